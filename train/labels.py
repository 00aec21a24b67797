"""What each head is taught: the only place where the offset between a position and its label exists.

Head k (from 0) at position t is taught token t + k + 2: the backbone's own LM head already guesses t + 1.

    ids       a b c d e | f g         two documents
    head 0    c d e . . | . .
    head 1    d e . . . | . .         never across a document's end, never from padding
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100
FIRST_OFFSET = 2
NEXT = 1  # the LM head's own


def head_labels(
    input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, num_heads: int, first: int = FIRST_OFFSET
) -> Tensor:
    """Labels [K, B, T] for ids [B, T]; `IGNORE` where there is nothing to teach.

    Args:
        loss_mask: [B, T] True for tokens that may be taught, looked up at the label's position.
        document_ids: [B, T] which document a token belongs to; padding has one of its own and no loss.
        first: how far ahead head 0 looks.
    """
    length = input_ids.shape[1]
    labels = torch.full((num_heads, *input_ids.shape), IGNORE, dtype=torch.long, device=input_ids.device)
    for head in range(num_heads):
        offset = head + first
        if offset >= length:
            break
        taught = loss_mask[:, offset:].bool() & (document_ids[:, offset:] == document_ids[:, :-offset])
        labels[head, :, :-offset] = torch.where(taught, input_ids[:, offset:], IGNORE)
    return labels
