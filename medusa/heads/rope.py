"""Positions as rope_angles (Su et al. 2021, arXiv 2104.09864): inner products then depend on distances alone.

Shapes: D head size, ... any number of positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 10_000.0


def rope_angles(position_ids: Tensor, head_size: int, dtype: torch.dtype, base: float = BASE) -> tuple[Tensor, Tensor]:
    """positions [...] -> cosines and sines [..., D], the halves alike as Llama takes them."""
    powers = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    angles = position_ids[..., None].float() * base**-powers
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def apply_rope(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """x [..., D], rotated by what `rope_angles` gave."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
