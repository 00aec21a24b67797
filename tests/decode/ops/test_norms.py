"""decode/ops/norms.py: transformers' RMS norms in fewer operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from decode import generate
from decode.ops import norms
from decode.ops.norms import fast_norms
from tests.helpers import left_padded, plain, random_heads, random_ids, shared_model, tiny_model


class Means(TorchDispatchMode):
    """Counts means: Llama's norm makes one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mean.dim
        return func(*args, **(kwargs or {}))


def norm_of(size: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(size, eps).to(dtype)
    nn.init.normal_(norm.weight)
    return norm


def exact(norm: LlamaRMSNorm, x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight.detach().double()


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("shape", [(1, 11, 64), (2, 3, 4, 8), (1, 1, 1536)], ids=str)
@torch.no_grad()
def test_results_are_as_exact_as_those_of_transformers(shape: tuple[int, ...], eps: float) -> None:
    norm = norm_of(shape[-1], eps)
    for scale in (1e-4, 1.0, 1e4):
        x = scale * torch.randn(shape)
        with Means() as used, fast_norms(norm):
            found = norm(hidden_states=x)
        assert used.count == 0
        torch.testing.assert_close(found.double(), exact(norm, x), rtol=1e-6, atol=0)
        torch.testing.assert_close(norm(x).double(), exact(norm, x), rtol=1e-6, atol=0)


@torch.no_grad()
def test_extreme_numbers_give_what_transformers_gives() -> None:
    norm = norm_of(4)
    rows = [[0.0] * 4, [1e-25] * 4, [1e20, 1.0, 1.0, 1.0], [torch.inf, 1.0, 1.0, 1.0], [torch.nan, 1.0, 1.0, 1.0]]
    expected = norm(torch.tensor(rows))
    with fast_norms(norm):
        torch.testing.assert_close(norm(torch.tensor(rows)), expected, equal_nan=True)


def test_everything_else_is_left_to_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of other dtypes, gradients, and graphs of `torch.compile`."""
    norm, x = norm_of(8), torch.randn(2, 3, 8)
    with torch.no_grad():
        cases = [x.bfloat16(), x.double()]
        expected = [norm(case) for case in cases]
        with Means() as used, fast_norms(norm):
            found = [norm(case) for case in cases]
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                norm(x)
    assert used.count == len(cases) + 1
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    with fast_norms(norm):
        norm(x).sum().backward()
    assert norm.weight.grad is not None
    gradient, norm.weight.grad = norm.weight.grad, None
    norm(x).sum().backward()
    assert torch.equal(norm.weight.grad, gradient)


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen3"])
def test_norms_are_replaced_only_in_the_context(family: str) -> None:
    """All of them: two or, with norms of queries and keys, four in a layer, and the last one."""
    model = shared_model(family)
    changed = [module for module in model.modules() if "variance_epsilon" in vars(module)]
    assert len(changed) == (4 if family == "qwen3" else 2) * model.config.num_hidden_layers + 1

    def replaced() -> set[bool]:
        return {"forward" in vars(module) for module in changed}

    def fails() -> None:
        opened = fast_norms(model.get_decoder())
        with opened:
            with opened, fast_norms(model.get_decoder()):  # the second is that of another text
                assert replaced() == {True}
            assert replaced() == {True}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert replaced() == {False}


@pytest.mark.parametrize("family", ["gemma2", "olmo2", "gpt2"])
def test_other_norms_stay(family: str) -> None:
    """Gemma adds 1 to the weight, OLMo rounds later, and GPT-2 subtracts the mean."""
    decoder = shared_model(family).get_decoder()
    before = [set(vars(module)) for module in decoder.modules()]
    with fast_norms(decoder):
        assert [set(vars(module)) for module in decoder.modules()] == before


def test_norms_with_other_weights_stay() -> None:
    """Half precision, which rounds in another place, and a single weight for numbers of any size."""
    for norm in (norm_of(8, dtype=torch.bfloat16), norm_of(1)):
        with fast_norms(norm):
            assert "forward" not in vars(norm)


@torch.no_grad()
def test_what_a_user_has_put_there_is_kept() -> None:
    """A `forward` of the object or of its class, and hooks."""

    def own(x: Tensor) -> Tensor:
        return 2 * x

    norm, x = norm_of(8), torch.randn(3, 8)
    norm.forward = own
    with fast_norms(norm):
        assert torch.equal(norm(x), 2 * x)
    assert vars(norm).pop("forward") is own
    with fast_norms(norm):
        norm.register_forward_hook(lambda module, args, out: 0 * out)
        assert not norm(x).any()
    other = type("Other", (LlamaRMSNorm,), {"forward": lambda self, hidden_states: own(hidden_states)})(8)
    with fast_norms(other):
        assert torch.equal(other(x), 2 * x)


def test_texts_equal_generate_also_after_a_change_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = tiny_model("llama"), {"max_new_tokens": 16, "do_sample": False}
    heads, prompts, calls, normed = (
        random_heads(model),
        [random_ids(12), random_ids(5, seed=1)],
        list[object](),
        norms.normed,
    )

    def counted(*inputs: Any) -> Tensor:
        calls.append(inputs)
        return normed(*inputs)

    monkeypatch.setattr(norms, "normed", counted)
    texts = []
    for _ in range(2):
        out = generate(model, heads, **left_padded(prompts), tree="topk:2,1", **options)
        texts.append(out[:, 12:].tolist())
        assert texts[-1] == [plain(model, prompt, **options) for prompt in prompts]
        nn.init.normal_(model.model.norm.weight.data)  # PyTorch counts no change of `data`
    assert texts[0] != texts[1]
    assert len(calls) >= 2 * (2 * model.config.num_hidden_layers + 1)
