"""decode/ops/fast_linear.py: PyTorch's linear layers by another library."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from decode import generate
from decode.draft import Draft, Frontier, NoDraft
from decode.ops import fast_linear as module
from decode.ops.fast_linear import MIN_PRODUCTS, fast_linear, linear
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.session import Session
from tests.helpers import left_padded, plain, random_heads, random_ids, run_steps, tiny_model

STOCK = torch._C._nn.linear
WEIGHT = torch.nn.Parameter(torch.randn(1024, 256))


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all machines behave like one with an AMD CPU."""
    monkeypatch.setattr(module, "PREFERS_ONEDNN", True)


class ByOneDNN(TorchDispatchMode):
    """Counts the products that oneDNN computes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.mkldnn._linear_pointwise.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [None, torch.randn(1024)], ids=["without bias", "with bias"])
@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 256), torch.randn(2, 5, 256), torch.randn(2, 256, 5).mT, torch.randn(1, 9, 512)[..., ::2]],
    ids=["two dimensions", "three", "transposed", "with gaps"],
)
@pytest.mark.parametrize("weight", [WEIGHT, torch.randn(256, 1024).T], ids=["a parameter", "a transposed weight"])
@torch.no_grad()
def test_products_equal_those_of_pytorch(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with fast_linear(WEIGHT, 8), ByOneDNN() as used:
        found = linear(x, weight, bias)
    assert used.count == 1
    exact = STOCK(x.double(), weight.double(), None if bias is None else bias.double())
    assert found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-4)  # 256 products of about 1; a bias is 1
    torch.testing.assert_close(STOCK(x, weight, bias).double(), exact, rtol=0, atol=2e-4)


def test_everything_else_is_left_to_pytorch() -> None:
    x, one, few = torch.randn(8, 256), torch.randn(1, 256), torch.randn(MIN_PRODUCTS // WEIGHT.numel() - 1, 256)
    with fast_linear(WEIGHT, 8), ByOneDNN() as used:
        linear(x, WEIGHT).sum().backward()
        assert WEIGHT.grad is not None
        with torch.no_grad():
            for tokens in (one, few):
                assert torch.equal(linear(tokens, WEIGHT), STOCK(tokens, WEIGHT))
            assert linear(x.double(), WEIGHT.double()).dtype == torch.float64
            with torch.autocast("cpu", torch.bfloat16):
                assert linear(x, WEIGHT).dtype == torch.bfloat16
    assert not used.count


@torch.no_grad()
def test_unusual_weights_and_biases_are_left_to_pytorch() -> None:
    """oneDNN reads a bias as 1024 numbers that lie side by side, and fails for other weights."""
    x, many = torch.randn(8, 256), torch.randn(2048, 1024)
    with fast_linear(WEIGHT, 8):
        for bias in (torch.tensor(3.0), torch.randn(1), torch.randn(2048)[::2], torch.randn(8, 1024)):
            assert torch.equal(linear(x, WEIGHT, bias), STOCK(x, WEIGHT, bias))
        assert torch.equal(linear(many, many[0]), STOCK(many, many[0]))


def used_in(weight: Tensor, tokens: int) -> int:
    """The products that oneDNN computes of 8 tokens, in a context for a forward over so many `tokens`."""
    with torch.no_grad(), fast_linear(weight, tokens), ByOneDNN() as used:
        F.linear(torch.randn(8, 256), WEIGHT)
    return used.count


def test_it_works_only_in_the_context_of_large_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        with fast_linear(WEIGHT, 8):
            assert used_in(WEIGHT, 8) == 1
            assert used_in(WEIGHT, 1) == 1, "the outer context goes on"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    for weight, tokens in ((WEIGHT, 1), (WEIGHT, 2), (WEIGHT.bfloat16(), 64), (WEIGHT.to("meta"), 64)):
        assert not used_in(weight, tokens)
    monkeypatch.setattr(module, "PREFERS_ONEDNN", False)
    assert not used_in(WEIGHT, 64)


@torch.no_grad()
def test_other_threads_do_not_notice() -> None:
    """Each thread has its own context: one that opens and closes it leaves this one's open, too."""
    x = torch.randn(8, 256)

    def elsewhere() -> tuple[int, int, bool]:
        with torch.no_grad(), ByOneDNN() as before:
            same = torch.equal(F.linear(x, WEIGHT), STOCK(x, WEIGHT))
        return before.count, used_in(WEIGHT, 8), same

    with ThreadPoolExecutor(1) as other:
        with fast_linear(WEIGHT, 8):
            assert other.submit(elsewhere).result() == (0, 1, True)
            with ByOneDNN() as used:
                F.linear(x, WEIGHT)
            assert used.count == 1
            running = other.submit(fast_linear(WEIGHT, 8).__enter__)
            running.result()
        with ByOneDNN() as used:
            F.linear(x, WEIGHT)
        assert not used.count, "the other thread's open context is not ours"


def test_a_custom_function_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(*args: Any) -> Tensor:
        return STOCK(*args)

    monkeypatch.setattr(F, "linear", own)
    with fast_linear(WEIGHT, 8):
        assert F.linear is own
    assert F.linear is own


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_text_equals_generate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all products by oneDNN, also those of the prefill."""
    monkeypatch.setattr(module, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(module, "MIN_PACKED", 1)
    model = tiny_model(family)
    prompts, options = [random_ids(12), random_ids(5, seed=1)], {"max_new_tokens": 24, "do_sample": False}
    with ByOneDNN() as used:
        out = generate(model, random_heads(model), **left_padded(prompts), tree="topk:3,2,1", **options)
    assert used.count > 24
    assert out[:, 12:].tolist() == [plain(model, prompt, **options) for prompt in prompts]


@torch.no_grad()
def test_drafts_take_it_too() -> None:
    """Heads that share the LM head spend most of a draft's time there."""
    seen: list[int] = []

    class Recording(NoDraft):
        def propose(self, frontier: Frontier) -> Draft:
            seen.append(used_in(WEIGHT, 1))  # only an outer context counts
            return super().propose(frontier)

    model = tiny_model("llama", vocab_size=1 << 16)
    requests = prepare(model, [random_ids(3), random_ids(4)], max_new_tokens=4, do_sample=False, eos_token_id=None)
    run_steps(Session(model, requests), Recording(torch.device("cpu")), AcceptanceRule("greedy"))
    assert seen
    assert set(seen) == {1}
