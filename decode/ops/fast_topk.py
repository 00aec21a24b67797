"""The most probable token (by `medusa.argmax`) and the k most probable ones, faster than PyTorch alone.

For the k largest values, a vectorised `amax` finds the maximum of each block of values, and only the blocks with the
largest maxima are searched.

Shapes: V values in each row."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.argmax import argmax

BLOCK = 128
WORTHWHILE = 1 << 15
"""Minimum number of values for a search by blocks on a CPU; its seven operations take 22 us, as PyTorch for 35,000."""
SHORTEST, LONGEST, MOST, MOST_ROWS = 1 << 13, 20_000, 64, 20
"""The lengths of rows, the greatest k and number of rows, for which rows are searched by blocks on a GPU."""


def most_probable(logits: Tensor) -> Tensor:
    """The most probable token [...] of logits [..., V]; float64 is compared as float32, as transformers does."""
    return argmax(logits.float() if logits.dtype == torch.float64 else logits)


class TopK(NamedTuple):
    """The k largest values along the last dimension, largest first, and their indices; equal values in any order."""

    values: Tensor  # [..., k] the values
    indices: Tensor  # [..., k] their indices in the row


def top_k(values: Tensor, k: int) -> TopK:
    """The k largest of `values` [..., V] and their indices, as `values.topk(k)` finds them; of equal ones, any."""
    compiling = torch.compiler.is_compiling()
    block = block_for(values.device.type, values.numel(), values.shape[-1], k, compiling)
    if block:
        return by_blocks(values, k, block)
    if k == 1 and values.is_cpu and compiling:
        # Inductor joins an argmax with the operations around it, but calls PyTorch for a top-k.
        place = values.argmax(-1, keepdim=True)
        return TopK(values.gather(-1, place), place)
    return TopK(*values.topk(k, dim=-1))


def block_for(device: str, count: int, size: int, k: int, compiling: bool) -> int:
    """Choose the size of blocks in which rows of `size` values are searched, of `count` values in all; 0: none.

    On a GPU, PyTorch gives each of up to 20 rows of less than 20,000 values to one multiprocessor, which takes 3 ns for
    a value: 52 us for 16,384 on an H200, and 5 for some hundreds. The size chosen here makes V / block + k block
    smallest, the values that both searches read. Outside compiled code, it takes as long to start the other kernels."""
    if device == "cpu":
        return BLOCK if size >= 8 * k * BLOCK and count >= WORTHWHILE else 0
    fits = SHORTEST <= size < LONGEST and k <= MOST and count <= MOST_ROWS * size
    if device != "cuda" or not compiling or not fits:
        return 0
    return 1 << round(math.log2(size / k) / 2)


def by_blocks(values: Tensor, k: int, block: int) -> TopK:
    """Find the k largest of `values` [..., V] in those `block`s of values that have the largest maxima."""
    size = values.shape[-1]
    # The k largest values lie in the k blocks with the largest maxima, or after the last whole block.
    maxima = values[..., : size - size % block].unflatten(-1, (-1, block)).amax(-1)
    start = maxima.topk(k, dim=-1).indices * block
    at = (start[..., None] + torch.arange(block, device=values.device)).flatten(-2)  # [..., k * block]
    rest = torch.arange(size - size % block, size, device=values.device)
    at = torch.cat([at, rest.expand(*at.shape[:-1], -1)], dim=-1)
    best = values.gather(-1, at).topk(k, dim=-1)
    return TopK(best.values, at.gather(-1, best.indices))
