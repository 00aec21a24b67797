"""decode/ops/attention.py: transformers' sdpa without its copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, LlamaConfig
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.cache import TreeCache
from decode.draft import Draft
from decode.ops.attention import SDPA, grouped, sdpa_grouped
from decode.reader import Reader
from decode.topology import Topology
from medusa.backbone import Backbone
from tests.helpers import FIRST_TRANSFORMERS, random_ids, random_tree, tiny_model

CPU = torch.device("cpu")


def verify(model: Any) -> torch.Tensor:
    tree, reader = Topology.of(random_tree(9)), Reader(Backbone(model), TreeCache(model.config, 2, 40, CPU))
    with torch.no_grad():
        reader.prefill(torch.tensor([random_ids(12), random_ids(12, seed=1)]), [12, 7])
        ids = torch.tensor([random_ids(10, seed=2), random_ids(10, seed=3)])
        return reader(Draft(ids, tree)).logits


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
        patch.setattr("decode.reader.grouped", lambda *args: torch.no_grad())
        expected = verify(model)
    assert calls, "nothing was copied in the first place: no power"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # float32, the same sums in another order at most


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """A function that attends, and says whether transformers' sdpa did so, which repeats keys."""
    found, stock = list[Any](), sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda *args: found.append(args) or stock(*args))
    module, query, key = torch.nn.Module(), torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    module.num_key_value_groups = 2

    def attends() -> bool:
        found.clear()
        with torch.no_grad():
            ALL_ATTENTION_FUNCTIONS[SDPA](module, query, key, key, torch.zeros(2, 1, 5, 5))
        return bool(found)

    return attends


def test_it_works_only_in_its_context(repeats: Callable[[], bool]) -> None:
    """Contexts may be nested, and end by errors; the name on the model never changes."""
    config = tiny_model("llama").config

    def fails() -> None:
        with grouped(config):
            with grouped(config):
                assert not repeats()
            assert not repeats()
            assert config._attn_implementation == SDPA
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert repeats()
    config._attn_implementation = "eager"
    with grouped(config):
        assert repeats()


def test_other_threads_do_not_notice(repeats: Callable[[], bool]) -> None:
    """While a forward runs here, a model in another thread gets transformers' sdpa, but in its own contexts."""
    config = tiny_model("llama").config

    def elsewhere() -> tuple[bool, bool, bool]:
        before = repeats()
        with grouped(config):
            inside = repeats()
        return before, inside, repeats()

    with ThreadPoolExecutor(1) as other:
        with grouped(config):
            assert other.submit(elsewhere).result() == (True, False, True)
            assert not repeats()
            other.submit(grouped(config).__enter__).result()
        assert repeats(), "the other thread's open context is not ours"


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
    """Gradients, one mask row for all queries, and options of other models."""
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    module, mask = torch.nn.Module(), torch.randn(2, 1, 5, 5)
    module.num_key_value_groups = 2
    stock = sdpa_attention.sdpa_attention_forward
    with torch.no_grad(), grouped(LlamaConfig(attn_implementation=SDPA)):
        for few in (mask[:, :, :1], mask[:1, :, :1]):
            assert torch.equal(sdpa_grouped(module, query, key, key, few)[0], stock(module, query, key, key, few)[0])
        one = key[:1]
        assert torch.equal(sdpa_grouped(module, query, one, one, mask)[0], stock(module, query, one, one, mask)[0])
        if not FIRST_TRANSFORMERS:
            with pytest.raises(ValueError, match="softcap"):
                sdpa_grouped(module, query, key, key, mask, softcap=30.0)
    with torch.enable_grad(), grouped(LlamaConfig(attn_implementation=SDPA)):
        assert torch.equal(sdpa_grouped(module, query, key, key, mask)[0], stock(module, query, key, key, mask)[0])
