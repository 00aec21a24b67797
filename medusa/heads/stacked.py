"""Products with the stacked weights of K heads, which a faster function may compute.

A module names its parameters with such weights in `stacked_weights`.

Shapes: K heads, of which k run, M positions, I inputs and O outputs of a layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Product(Protocol):
    """A function that computes `product`, or returns `None` where it does not."""

    def __call__(self, input: Tensor, weight: Tensor, heads: slice, bias: Tensor | None) -> Tensor | None: ...


FASTER: list[Product] = []
"""Functions that are asked before PyTorch: `decode.ops.fast_linear` adds one."""


def product(input: Tensor, weight: Tensor, heads: slice, bias: Tensor | None = None) -> Tensor:
    """Compute `input` [k, M, I] times the rows `heads` of `weight` [K, I, O], plus those of `bias` [K, 1, O]."""
    for faster in FASTER:
        if (found := faster(input, weight, heads, bias)) is not None:
            return found
    if bias is None:
        return torch.bmm(input, weight[heads])
    return torch.baddbmm(bias[heads], input, weight[heads])
