"""decode/ops/rotary.py: transformers' rotary embeddings in fewer operations."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from decode import generate
from decode.ops import rotary
from decode.ops.rotary import MAX_NUMBERS, fast_rotary, rotated
from decode.ops.stock_code import code_of
from tests.helpers import left_padded, plain, random_heads, random_ids, shared_model

STOCK = modeling_llama.apply_rotary_pos_emb


class Negations(TorchDispatchMode):
    """Counts negations: transformers makes one for queries and one for keys."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.neg.default
        return func(*args, **(kwargs or {}))


def numbers(batch: int, tokens: int, heads: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys on half as many heads, cosines and sines, as a model gives them."""
    q, k = (torch.randn(batch, tokens, count, size, dtype=dtype).transpose(1, 2) for count in (heads, heads // 2))
    return [q, k, torch.randn(batch, tokens, size, dtype=dtype), torch.randn(batch, tokens, size, dtype=dtype)]


def file_of(family: str) -> tuple[Any, ModuleType]:
    base = shared_model(family).get_decoder()
    return base, sys.modules[type(base).__module__]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 11, 8, 8), (3, 5, 4, 32), (1, 1, 2, 64)], ids=str)
def test_results_are_equal_bit_by_bit(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    inputs = numbers(*shape, dtype)
    with Negations() as used:
        found = rotated(*inputs)
    assert used.count == 1
    for part, expected in zip(found, STOCK(*inputs), strict=True):
        assert part.dtype == expected.dtype
        assert torch.equal(part, expected)


def test_everything_else_is_left_to_transformers() -> None:
    """Large inputs, heads in the third dimension, and keys of another dtype or number of tokens."""
    usual = numbers(1, 5, 4, 8)
    large, (q, k, cos, sin) = numbers(1, MAX_NUMBERS // 32, 4, 8), usual
    heads_third = [q.transpose(1, 2), k.transpose(1, 2), cos, sin]
    cases = [(large, 1), (heads_third, 2), ([q, k.double(), cos, sin], 1), ([q, k[:, :, :1], cos, sin], 1)]
    for (queries, keys, cos, sin), dimension in cases:
        with Negations() as used:
            found = rotated(queries, keys, cos, sin, dimension)
        assert used.count == 2
        assert all(map(torch.equal, found, STOCK(queries, keys, cos, sin, dimension)))


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen3"])
def test_functions_are_replaced_only_in_the_context(family: str) -> None:
    base, file = file_of(family)
    copied = file.apply_rotary_pos_emb

    def fails() -> None:
        with fast_rotary(base, on_cpu=True):
            with fast_rotary(base, on_cpu=True):
                assert file.apply_rotary_pos_emb is rotated
            assert file.apply_rotary_pos_emb is rotated
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert file.apply_rotary_pos_emb is copied
    with fast_rotary(base, on_cpu=False):
        assert file.apply_rotary_pos_emb is copied


@pytest.mark.parametrize("family", ["cohere", "olmo2", "gpt2"])
def test_other_rotations_stay(family: str) -> None:
    """Cohere rotates neighbours, OLMo in float32, and GPT-2 not at all."""
    base, file = file_of(family)
    before = vars(file).get("apply_rotary_pos_emb")
    with fast_rotary(base, on_cpu=True):
        assert vars(file).get("apply_rotary_pos_emb") is before


def test_a_model_whose_file_has_no_name_is_left_alone() -> None:
    unnamed = type("Unnamed", (torch.nn.Module,), {"__module__": "not.imported"})
    with fast_rotary(unnamed(), on_cpu=True):
        pass


def test_functions_with_other_defaults_are_others() -> None:
    """The same code would rotate the heads of another dimension."""

    def third(x: Tensor, dimension: int = 1) -> Tensor:
        return x.unsqueeze(dimension)

    before = code_of(third)
    third.__defaults__ = (2,)
    assert code_of(third) != before


def test_a_custom_function_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    base, file = file_of("llama")

    def own(*args: Any, **kwargs: Any) -> Any:
        return STOCK(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(file, "apply_rotary_pos_emb", own)
        for known in (True, False):  # the function is there after, or before, the file is first looked at
            with fast_rotary(base, on_cpu=True):
                assert file.apply_rotary_pos_emb is own
            assert file.apply_rotary_pos_emb is own
            if known:
                rotary._setting.cache_clear()
    rotary._setting.cache_clear()


def test_text_equals_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model, options = shared_model("llama"), {"max_new_tokens": 16, "do_sample": False}
    prompts = [random_ids(12), random_ids(5, seed=1)]
    calls: list[object] = []

    def counted(*inputs: Any) -> tuple[Tensor, Tensor]:
        calls.append(inputs)
        return rotated(*inputs)

    monkeypatch.setattr(rotary, "rotated", counted)
    out = generate(model, random_heads(model), **left_padded(prompts), tree="topk:2,1", **options)
    assert len(calls) >= 2 * model.config.num_hidden_layers
    assert out[:, 12:].tolist() == [plain(model, prompt, **options) for prompt in prompts]
