"""medusa/argmax.py: equal to torch's argmax, index for index."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from medusa.argmax import argmax

SIZES = [64, 1024, 1025, 5000]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_ties_give_the_first_index(size: int, dtype: torch.dtype) -> None:
    """The values are integers from 0 to 39, so the greatest one occurs often, and far apart in long rows."""
    values = torch.randint(0, 40, (3, 50, size)).to(dtype)
    first = (values == values.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(values), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_infinities_and_nan(dtype: torch.dtype) -> None:
    values = torch.full((2, 1024), -torch.inf, dtype=dtype)
    values[1, [700, 900]] = torch.nan
    assert argmax(values).tolist() == values.argmax(-1).tolist() == [0, 700]


def test_argmax_of_any_tensor() -> None:
    """One row, no rows, rows that do not lie one after another, gradients, and a subclass without an array."""
    values = torch.randn(300, 7)
    for some in (values[0], values[:0], values.T, values[:1].expand(4, -1), values.clone().requires_grad_()):
        assert torch.equal(argmax(some), some.argmax(-1))
    with FakeTensorMode():
        assert argmax(torch.empty(3, 5)).shape == (3,)
