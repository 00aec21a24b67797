"""The labels of heads: the token that each head learns at each position.

Head k (from 0) at position t learns token t + k + 2, because the backbone's own LM head already predicts token t + 1.

    ids       a b c d e | f g         two documents
    head 0    c d e . . | . .
    head 1    d e . . . | . .         a dot: no label, because the token would lie beyond the document's end

Shapes: K heads, B rows, T tokens."""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100  # a label that does not count in the loss, as in PyTorch
FIRST_OFFSET = 2  # from a position to the label of head 0
NEXT = 1  # from a position to the label of the backbone's own LM head


def head_labels(
    input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, num_heads: int, first: int = FIRST_OFFSET
) -> Tensor:
    """Make the labels [K, B, T] of K heads for B rows of T tokens; `IGNORE` where a head has no label.

    A token may be a label where `loss_mask` [B, T] is True. A label is in the same document as its position, by
    `document_ids` [B, T]; padding has its own id. `first` is the offset from a position to the label of head 0."""
    length = input_ids.shape[1]
    labels = torch.full((num_heads, *input_ids.shape), IGNORE, dtype=torch.long, device=input_ids.device)
    for offset in range(first, min(first + num_heads, length)):
        labelled = loss_mask[:, offset:].bool() & (document_ids[:, offset:] == document_ids[:, :-offset])
        labels[offset - first, :, :-offset] = torch.where(labelled, input_ids[:, offset:], IGNORE)
    return labels


def taught_positions(labels: Tensor) -> Tensor:
    """Find the positions [P] at which the heads learn from labels [K, B * T]: those at which head 0 has a label.

    Without a label of head 0 no decoding step starts there, so the other heads need none."""
    return (labels[0] != IGNORE).nonzero()[:, 0]
