"""The inputs of heads: hidden states, embeddings of following tokens, and the keys, values and masks of earlier text.

Shapes: `...` any positions, K heads, H hidden size, B rows, T tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa.heads.context_kv import ContextKV


class HeadInputs(NamedTuple):
    """The inputs of heads at some positions of some texts, in training, evaluation, calibration and decoding.

    `MedusaHeads.inputs` builds these inputs from whole texts. Decoding builds them from its caches."""

    hidden: Tensor  # [..., H] hidden states of the backbone, or the output of the heads' prefix layers
    following: Tensor | None = None  # [..., K, H] embeddings of the K tokens after each position, if heads read them
    context_kv: ContextKV | None = None  # keys and values of the text before each position, for kinds that attend to it


def following_ids(input_ids: Tensor, count: int) -> Tensor:
    """Return the `count` tokens after each position [B, T, count] of the texts `input_ids` [B, T].

    After the end of a row, its last token is repeated. A following token can belong to another packed document. This
    does no harm: a head that reads it predicts a later token, and training ignores labels in other documents."""
    last = input_ids[:, -1:].expand(-1, count)
    return torch.cat([input_ids, last], dim=1)[:, 1:].unfold(1, count, 1)


def visible(length: int, document_ids: Tensor | None, device: torch.device, before: int = 0) -> Tensor:
    """Build the attention mask [B, T, T] of texts with T = `length` tokens. It is true at visible positions.

    A position attends to positions of its document (`document_ids` [B, T]) that are at least `before` positions
    earlier; with `before` = 0 this includes itself. Without document ids the mask is [1, T, T]."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril(-before)[None]
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
    return seen
