"""decode/ops/fast_topk.py: equal to torch's argmax and topk, index for index."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from decode.ops import fast_topk as greatest
from decode.ops.fast_topk import BLOCK, argmax, top_k

SIZES = [8 * BLOCK, 8 * BLOCK + 1, 9 * BLOCK - 1, 5000]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greatest, "WORTHWHILE", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_ties_give_the_first_index(size: int, dtype: torch.dtype) -> None:
    """The values are integers from 0 to 40, so the greatest occurs about a dozen times, often far apart."""
    values = torch.randint(0, 40, (3, 50, size)).to(dtype)
    first = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    assert (first != argmax(values[..., BLOCK:]) + BLOCK).any(), "never among the first values: no power"
    assert torch.equal(argmax(values), first)


@pytest.mark.parametrize("size", SIZES)
def test_every_index_is_found(size: int) -> None:
    """This includes the remainder after the last whole block."""
    values = torch.eye(size)
    assert torch.equal(argmax(values), torch.arange(size))
    assert torch.equal(top_k(values, 1).indices[:, 0], torch.arange(size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_and_nan(dtype: torch.dtype) -> None:
    values = torch.full((2, 8 * BLOCK), -torch.inf, dtype=dtype)
    values[1, [700, 900]] = torch.nan
    assert argmax(values).tolist() == values.argmax(-1).tolist() == [0, 700]


def test_argmax_of_any_tensor() -> None:
    """One row, no rows, rows that do not lie one after another, gradients, and a subclass without an array."""
    values = torch.randn(300, 7)
    for some in (values[0], values[:0], values.T, values[:1].expand(4, -1), values.clone().requires_grad_()):
        assert torch.equal(argmax(some), some.argmax(-1))
    with FakeTensorMode():
        assert argmax(torch.empty(3, 5)).shape == (3,)


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("size", [80 * BLOCK, 80 * BLOCK + 77])
def test_the_k_greatest_in_order(size: int, k: int) -> None:
    values = torch.stack([torch.randperm(size).float() for _ in range(20)])
    values[0] = torch.arange(size)  # all of them in the last block or behind it
    assert all(map(torch.equal, top_k(values, k), values.topk(k)))


def test_small_tensors_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greatest, "_block_maxima", None)
    assert top_k(torch.arange(60.0), 2).indices.tolist() == [59, 58]
