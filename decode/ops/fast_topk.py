"""The most probable token (by `medusa.argmax`) and the k most probable ones, faster than PyTorch on a CPU.

For the k largest values, the vectorised `amax` finds the maximum of each block of values, and only the blocks with the
largest maxima are searched.

Shapes: V values in each row, in blocks of BLOCK."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa.argmax import argmax

BLOCK = 128
WORTHWHILE = 1 << 15
"""Minimum number of values for a search by blocks; its seven operations cost 22 us, as PyTorch for 35,000 values."""


def most_probable(logits: Tensor) -> Tensor:
    """The most probable token [...] of logits [..., V]; float64 is compared as float32, as transformers does."""
    return argmax(logits.float() if logits.dtype == torch.float64 else logits)


class TopK(NamedTuple):
    """The k largest values along the last dimension, largest first, and their indices; equal values in any order."""

    values: Tensor  # [..., k] the values
    indices: Tensor  # [..., k] their indices in the row


def top_k(values: Tensor, k: int) -> TopK:
    """The k largest of `values` [..., V] and their indices, as `values.topk(k)` finds them."""
    size = values.shape[-1]
    if not searches_blocks(values, k):
        if k == 1 and values.is_cpu and torch.compiler.is_compiling():
            # Inductor joins an argmax with the operations around it, but calls PyTorch for a top-k.
            place = values.argmax(-1, keepdim=True)
            return TopK(values.gather(-1, place), place)
        return TopK(*values.topk(k, dim=-1))
    # The k largest values lie in the k blocks with the largest maxima, or after the last whole block.
    start = _block_maxima(values).topk(k, dim=-1).indices * BLOCK
    at = (start[..., None] + torch.arange(BLOCK, device=values.device)).flatten(-2)  # [..., k * BLOCK]
    rest = torch.arange(size - size % BLOCK, size, device=values.device)
    at = torch.cat([at, rest.expand(*at.shape[:-1], -1)], dim=-1)
    best = values.gather(-1, at).topk(k, dim=-1)
    return TopK(best.values, at.gather(-1, best.indices))


def _block_maxima(values: Tensor) -> Tensor:
    whole = values[..., : values.shape[-1] // BLOCK * BLOCK]
    return whole.unflatten(-1, (-1, BLOCK)).amax(-1)


def searches_blocks(values: Tensor, k: int) -> bool:
    """Whether `top_k` searches by blocks, because this is faster than PyTorch's search."""
    return values.shape[-1] >= 8 * k * BLOCK and values.is_cpu and values.numel() >= WORTHWHILE
