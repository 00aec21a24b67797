"""decode/ops/grouped_attention.py: transformers' sdpa without its copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode.prefill import prefill
from decode.verify import Verifier
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.cache import TreeCache
from decode.draft import Draft
from decode.masks import visible
from decode.ops.grouped_attention import SDPA, grouped, sdpa_grouped
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.tree_support import LayerKind, additive
from tests.helpers import FIRST_TRANSFORMERS, random_ids, random_tree, tiny_model


def verify(model: Any) -> torch.Tensor:
    tree, backbone, cache = Topology.of(random_tree(9)), Backbone(model), TreeCache(model.config, 2, capacity=40)
    with torch.no_grad():
        prefill(backbone, cache, torch.tensor([random_ids(12), random_ids(12, seed=1)]), [12, 7])
        ids = torch.tensor([random_ids(10, seed=2), random_ids(10, seed=3)])
        return Verifier(backbone, cache)(Draft(ids, tree)).logits


@pytest.mark.parametrize("family", ["llama", "mistral, window", "gemma3_text", "llama4_text"])
def test_grouped_attention_equals_sdpa_without_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four query heads on two key heads give the same logits without a call of transformers' `repeat_kv`."""
    model, calls = tiny_model(family), []
    Backbone(model)  # tries out, once, how the model makes its logits
    stock = sdpa_attention.repeat_kv

    def counting(*args: Any) -> Any:
        calls.append(args)
        return stock(*args)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    found = verify(model)
    assert not calls
    with monkeypatch.context() as patch:
        for place in ("decode.verify", "decode.prefill"):
            patch.setattr(f"{place}.grouped", lambda *args: torch.no_grad())
        expected = verify(model)
    assert calls, "nothing was copied in the first place: no power"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # float32, the same sums in another order at most


def test_grouped_attention_is_active_only_in_its_context() -> None:
    """The last context to end restores the registry; the name on the model never changes."""
    config, stock = tiny_model("llama").config, sdpa_attention.sdpa_attention_forward

    def fails() -> None:
        with grouped(config):
            with grouped(config):
                assert ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_grouped
            assert ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_grouped
            assert config._attn_implementation == SDPA
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert ALL_ATTENTION_FUNCTIONS[SDPA] is stock
    config._attn_implementation = "eager"
    with grouped(config):
        assert ALL_ATTENTION_FUNCTIONS[SDPA] is stock


def test_a_custom_sdpa_is_kept() -> None:
    def own(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not called here")

    stock = ALL_ATTENTION_FUNCTIONS[SDPA]
    AttentionInterface.register(SDPA, own)
    try:
        with grouped(tiny_model("llama").config):
            assert ALL_ATTENTION_FUNCTIONS[SDPA] is own
        assert ALL_ATTENTION_FUNCTIONS[SDPA] is own
    finally:
        AttentionInterface.register(SDPA, stock)


def test_without_a_mask_transformers_sdpa_runs() -> None:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    found, _ = sdpa_grouped(module, query, key, key, None, is_causal=True)
    expected, _ = sdpa_attention.sdpa_attention_forward(module, query, key, key, None, is_causal=True)
    assert torch.equal(found, expected)


def test_what_decoding_never_asks_for_is_left_to_transformers() -> None:
    """Other threads may run models meanwhile: with gradients, one mask row for all queries, or options of their own."""
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    module, mask = torch.nn.Module(), torch.randn(2, 1, 5, 5)
    module.num_key_value_groups = 2
    stock = sdpa_attention.sdpa_attention_forward
    with torch.no_grad():
        for few in (mask[:, :, :1], mask[:1, :, :1]):
            assert torch.equal(sdpa_grouped(module, query, key, key, few)[0], stock(module, query, key, key, few)[0])
        one = key[:1]
        assert torch.equal(sdpa_grouped(module, query, one, one, mask)[0], stock(module, query, one, one, mask)[0])
        if not FIRST_TRANSFORMERS:
            with pytest.raises(ValueError, match="softcap"):
                sdpa_grouped(module, query, key, key, mask, softcap=30.0)
    assert torch.equal(sdpa_grouped(module, query, key, key, mask)[0], stock(module, query, key, key, mask)[0])


class Products(TorchDispatchMode):
    """Counts attention by matrix products, and by PyTorch's kernel."""

    products = kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.baddbmm.default
        self.kernels += "scaled_dot_product" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "kind", [LayerKind(), LayerKind(window=6), LayerKind(chunk=8)], ids=["full", "window", "chunk"]
)
@torch.no_grad()
def test_attention_of_tiny_heads_equals_sdpa(kind: LayerKind) -> None:
    """By matrix products, with heads of 8 numbers; values of another size, as in DeepSeek's layers, are allowed."""
    generator, module = torch.Generator().manual_seed(0), torch.nn.Module()
    tree, module.num_key_value_groups = Topology.of(random_tree(9)), 2
    mask = additive(visible(tree, [21], kind), torch.float32)[:, None]
    query, key = (torch.randn(1, n, 8, generator=generator) for n in (4 * 10, 2 * 31))
    query, key = query.view(1, 10, 4, 8).transpose(1, 2), key.view(1, 2, 31, 8)
    value = torch.randn(1, 2, 40, 5, generator=generator)[:, :, :31]  # a part of a cache
    with Products() as used:
        found, _ = sdpa_grouped(module, query, key, value, mask, scaling=0.5)
    assert (used.products, used.kernels) == (1, 0)
    exact = [part.double() for part in (query, key, value, mask)]
    expected, _ = sdpa_attention.sdpa_attention_forward(module, *exact, scaling=0.5)
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)  # a rounding of numbers of about 1


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "products"), [(1, False), (11, True), (128, True), (129, False)])
def test_compiled_attention_of_tiny_heads_is_one_graph_for_all_slots(tokens: int, products: bool) -> None:
    """Up to 512 queries of two key heads; a graph that asked for the slots would hold for one window of the cache."""
    module, graphs = torch.nn.Module(), list[torch.fx.GraphModule]()
    module.num_key_value_groups = 2

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def attend(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return sdpa_grouped(module, query, key, key, mask, scaling=0.5)[0]

    compiled = torch.compile(attend, backend=backend)
    for slots in (160, 200, 2**12):
        query, key, mask = torch.randn(1, 4, tokens, 8), torch.randn(1, 2, slots, 8), torch.randn(1, 1, tokens, slots)
        torch._dynamo.mark_dynamic(key, 2)
        torch._dynamo.mark_dynamic(mask, 3)
        found = compiled(query, key, mask)
        expected = attend(query.double(), key.double(), mask.double())
        # Roundings of numbers of about 1; exponentials in the kernel of PyTorch are less exact.
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    (graph,) = graphs
    assert any("baddbmm" in str(node.target) for node in graph.graph.nodes) == products


@torch.no_grad()
def test_other_attention_runs_pytorchs_kernel() -> None:
    """Heads of more numbers, several texts, few queries, long texts, and bfloat16."""
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    usual = {"batch": 1, "tokens": 10, "slots": 30, "size": 8, "dtype": torch.float32}
    for other in ({"batch": 2}, {"tokens": 7}, {"size": 16}, {"slots": 2**13}, {"dtype": torch.bfloat16}, {}):
        batch, tokens, slots, size, dtype = (usual | other).values()
        query, key = torch.randn(batch, 4, tokens, size, dtype=dtype), torch.randn(batch, 2, slots, size, dtype=dtype)
        with Products() as used:
            sdpa_grouped(module, query, key, key, torch.zeros(batch, 1, tokens, slots, dtype=dtype), scaling=0.5)
        assert (used.products, used.kernels) == ((0, 1) if other else (1, 0)), other
