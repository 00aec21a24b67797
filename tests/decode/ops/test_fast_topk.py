"""decode/ops/fast_topk.py: equal to torch's argmax and topk, index for index."""

from __future__ import annotations

import pytest
import torch

from decode.ops import fast_topk as greatest
from decode.ops.fast_topk import BLOCK, argmax, top_k

SIZES = [8 * BLOCK, 8 * BLOCK + 1, 9 * BLOCK - 1, 5000]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greatest, "WORTHWHILE", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_ties_give_the_first_index(size: int, dtype: torch.dtype) -> None:
    """The values are integers from 0 to 40, so the greatest occurs about a dozen times, often in several blocks."""
    values = torch.randint(0, 40, (3, 50, size)).to(dtype)
    first = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    assert (first != argmax(values[..., BLOCK:]) + BLOCK).any(), "always in the same block: no power"
    assert torch.equal(argmax(values), first)


@pytest.mark.parametrize("size", SIZES)
def test_every_index_is_found(size: int) -> None:
    """This includes the last block, which overlaps, and the remainder after the last whole block."""
    values = torch.eye(size)
    assert torch.equal(argmax(values), torch.arange(size))
    assert torch.equal(top_k(values, 1).indices[:, 0], torch.arange(size))


def test_infinities_and_nan() -> None:
    values = torch.full((2, 8 * BLOCK), -torch.inf)
    values[1, 700] = torch.nan
    assert argmax(values).tolist() == values.argmax(-1).tolist() == [0, 700]


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("size", [80 * BLOCK, 80 * BLOCK + 77])
def test_the_k_greatest_in_order(size: int, k: int) -> None:
    values = torch.stack([torch.randperm(size).float() for _ in range(20)])
    values[0] = torch.arange(size)  # all of them in the last block or behind it
    assert all(map(torch.equal, top_k(values, k), values.topk(k)))


def test_small_tensors_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greatest, "_block_maxima", None)
    assert argmax(torch.eye(5)).tolist() == [0, 1, 2, 3, 4]
    assert top_k(torch.arange(60.0), 2).indices.tolist() == [59, 58]
