"""decode/ops/fast_linear.py: copies of weights, which follow every change of the weights."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from decode import generate
from decode.ops import fast_linear
from decode.ops.fast_linear import linear, pack, packed
from decode.tree_check import check_tree_forward
from tests.helpers import plain, random_heads, random_ids, tiny_model

STOCK = torch._C._nn.linear


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all machines behave like one with an AMD CPU, and pack the weights of tiny models."""
    monkeypatch.setattr(fast_linear, "PREFERS_ONEDNN", True)
    monkeypatch.setattr(fast_linear, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(fast_linear, "MIN_PACKED", 1)
    monkeypatch.setattr(fast_linear, "MIN_NUMBERS", 1)


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(256, 96)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [2, 7, 16, 300])
def test_products_of_packed_weights_equal_those_of_pytorch(tokens: int) -> None:
    """Packed for no number of tokens, used for all; 256 products of about 1 are summed in another order."""
    one = layer()
    pack(one)
    assert packed(one.weight) is not None
    x = torch.randn(3, tokens, 256)
    exact = STOCK(x.double(), one.weight.double(), one.bias.double())
    torch.testing.assert_close(linear(x, one.weight, one.bias).double(), exact, rtol=0, atol=2e-5)


def plus(weight: Tensor) -> None:
    weight.data += 1


def one_number(weight: Tensor) -> None:
    weight.data[5, 7] += 1e-3


def rows_swapped(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(0))


def columns_swapped(weight: Tensor) -> None:
    weight.data.copy_(weight.data.flip(1))


def another(weight: Tensor) -> None:
    weight.data = torch.randn_like(weight)


def counted(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(2)


@pytest.mark.parametrize("change", [plus, one_number, rows_swapped, columns_swapped, another, counted])
@torch.no_grad()
def test_each_text_begins_with_the_present_weights(change: Callable[[Tensor], None]) -> None:
    """Changes by `.data`, as PEFT merges adapters, are not counted by PyTorch."""
    one, x = layer(), torch.randn(4, 256)
    pack(one)
    before, kept = linear(x, one.weight), packed(one.weight)
    change(one.weight)
    pack(one)
    found = linear(x, one.weight)
    torch.testing.assert_close(found, STOCK(x, one.weight), rtol=1e-5, atol=2e-5)
    assert not torch.equal(found, before)
    again = packed(one.weight)
    assert again is not None
    assert again is not kept
    pack(one)
    assert packed(one.weight) is again, "packed once"


def test_counted_changes_are_seen_at_once() -> None:
    one = layer()
    pack(one)
    counted(one.weight)
    assert packed(one.weight) is None


def test_copies_end_with_their_weights_and_have_their_own() -> None:
    one = layer()
    pack(one)
    twin, key = copy.deepcopy(one), id(one.weight)
    assert packed(twin.weight) is None
    assert key in fast_linear._PACKED
    del one
    gc.collect()
    assert key not in fast_linear._PACKED


def test_a_garbage_collection_may_end_weights_while_others_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread that holds the lock."""
    monkeypatch.setattr(fast_linear, "_LOCK", Lock())
    one, other, held, vector = layer(), layer(), [], fast_linear._vector
    pack(one)
    ring: list[Any] = [one]
    ring.append(ring)  # only a garbage collection frees it
    key = id(one.weight)
    del one, ring

    def collects(size: int) -> Tensor:
        held.append(key in fast_linear._PACKED)
        gc.collect()
        return vector(size)

    monkeypatch.setattr(fast_linear, "_vector", collects)
    thread = Thread(target=pack, args=(other,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert held == [True]
    assert key not in fast_linear._PACKED


def test_a_weight_that_changes_often_has_one_watcher() -> None:
    one = layer()
    for _ in range(3):
        pack(one)
        counted(one.weight)
    assert weakref.getweakrefcount(one.weight) == 1


def in_double(one: nn.Linear) -> None:
    one.double()


def turned(one: nn.Linear) -> None:
    one.weight.data = torch.randn(256, 96).T


@pytest.mark.parametrize("change", [in_double, turned])
@torch.no_grad()
def test_copies_end_when_their_weights_may_not_be_packed_any_more(change: Callable[[nn.Linear], None]) -> None:
    """PyTorch does not count that a weight got other numbers in this way."""
    one = layer()
    pack(one)
    change(one)
    pack(one)
    assert packed(one.weight) is None
    assert id(one.weight) not in fast_linear._PACKED


def test_defaults_of_the_caller_do_not_matter() -> None:
    fast_linear._vector.cache_clear()
    one = layer()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            pack(one)
    finally:
        torch.set_default_dtype(before)
    assert packed(one.weight) is not None


def test_models_too_large_for_a_second_copy_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer()
    twin = copy.deepcopy(one)
    pack(twin)
    monkeypatch.setattr(fast_linear, "_limit", lambda: one.weight.nbytes - 1)
    for each in (one, twin):
        pack(each)
        assert packed(each.weight) is None


def test_other_weights_are_left_alone() -> None:
    for other in (layer().double(), layer().bfloat16(), layer().to("meta"), nn.Embedding(30, 40), nn.LayerNorm(64)):
        pack(other)
        assert fast_linear.weight_of(other) is None


def test_text_equals_generate_before_and_after_a_change() -> None:
    """Also with the heads' product of the shared LM head."""
    model, options = tiny_model("llama"), {"max_new_tokens": 16, "do_sample": False}
    heads, prompt = random_heads(model, lm_head="shared"), random_ids(7)
    texts = []
    for _ in range(2):
        found = generate(model, heads, torch.tensor([prompt]), tree="topk:3,2,1", **options)
        texts.append(found[0, 7:].tolist())
        assert texts[-1] == plain(model, prompt, **options)
        assert all(packed(one.weight) is not None for one in model.modules() if isinstance(one, nn.Linear))
        for parameter in model.parameters():
            parameter.data *= -1.5
    assert texts[0] != texts[1], "the change has an effect"


def test_the_weights_of_an_amateur_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, amateur, prompt = tiny_model("llama"), tiny_model("llama", seed=1), torch.tensor([random_ids(7)])
    texts = []
    for _ in range(2):
        for by_onednn in (True, False):
            monkeypatch.setattr(fast_linear, "PREFERS_ONEDNN", by_onednn)
            heads = random_heads(model)
            found = generate(model, heads, prompt, amateur=amateur, max_new_tokens=16, do_sample=False)
            texts.append(found.tolist())
        pack(amateur)  # as texts of its own do
        for parameter in amateur.parameters():
            parameter.data *= -1.5
    first, first_stock, second, second_stock = texts
    assert (first, second) == (first_stock, second_stock)
    assert first != second, "the change has an effect"


def test_the_self_test_of_trees_reads_the_present_weights() -> None:
    model = tiny_model("llama")
    pack(model)
    for parameter in model.parameters():
        parameter.data *= -1.5
    assert check_tree_forward(model).ok


@torch.no_grad()
def test_compiled_steps_read_packed_weights() -> None:
    """The graph is compiled once, and follows a change of the weight."""
    one, x, called = layer(), torch.randn(4, 256), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        called.extend(node.target for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(lambda x: F.linear(x, one.weight, one.bias), backend=backend, fullgraph=True)
    for _ in range(2):
        pack(one)
        with fast_linear.fast_linear(one.weight, 4):
            found = compiled(x)
        assert called.count(torch.ops.medusa.linear) == 1
        torch.testing.assert_close(found, STOCK(x, one.weight, one.bias), rtol=1e-5, atol=2e-5)
        plus(one.weight)
