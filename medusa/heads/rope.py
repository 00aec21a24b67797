"""Rotary positions (Su et al. 2021, arXiv 2104.09864), and the attention heads that a hidden size is split into.

Inner products of rotated vectors depend on the distance of their positions alone.

Shapes: D attention head size, ... any positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.errors import RequestError

BASE = 10_000.0
HEAD_SIZE = 64


def attention_heads(hidden_size: int) -> int:
    """Number of attention heads of one even size, as near to 64 as the hidden size allows, which must be even."""
    if hidden_size % 2:
        raise RequestError(
            f"attention in heads needs an even hidden size, not {hidden_size}; take heads.kind=recurrent instead of "
            "eagle, and heads.prefix_layers=0"
        )
    count = max(hidden_size // HEAD_SIZE, 1)
    while hidden_size % (2 * count):
        count -= 1
    return count


def rope_angles(position_ids: Tensor, head_size: int, dtype: torch.dtype, base: float = BASE) -> tuple[Tensor, Tensor]:
    """positions [...] -> cosines and sines [..., D]; both halves are equal, as in Llama."""
    powers = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    angles = position_ids[..., None].float() * base**-powers
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def apply_rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., D] rotated by `angles`, the cosines and sines of `rope_angles`."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
