"""What heads are given at a position: one type for training, evaluation, calibration and decoding.

`MedusaHeads.inputs` builds it from whole texts; decoding builds it from its caches.

Shapes: ... any positions, K heads, H hidden size, B rows, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa.heads.context_kv import ContextKV


class HeadInputs(NamedTuple):
    """The inputs of heads at some positions of some texts."""

    hidden: Tensor
    """[..., H] hidden states: the backbone's, or the output of the heads' own prefix layers."""
    following: Tensor | None = None
    """[..., K, H] embeddings of the K tokens after each position, for kinds that follow the path."""
    context_kv: ContextKV | None = None
    """Keys and values of the text before each position, for kinds that look back."""


def following_ids(input_ids: Tensor, count: int) -> Tensor:
    """ids [B, T] -> the `count` tokens after each position [B, T, count]; after a row's end, its last token again.

    No head is taught at a position where one of these tokens belongs to another document: its label would, too.
    """
    last = input_ids[:, -1:].expand(-1, count)
    return torch.cat([input_ids, last], dim=1)[:, 1:].unfold(1, count, 1)
