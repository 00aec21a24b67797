"""Which token each head learns at each position.

Head k (from 0) at position t learns token t + k + 2, because the backbone's own LM head already predicts token t + 1.
No other module defines this offset.

    ids       a b c d e | f g         two documents
    head 0    c d e . . | . .
    head 1    d e . . . | . .         a dot: no label, because the token would lie beyond the document's end

Shapes: K heads, B rows, T tokens.
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
    """Labels [K, B, T] of the heads for ids [B, T]; `IGNORE` where there is nothing to teach.

    Args:
        loss_mask: [B, T] True for tokens that may be taught, read at the label's position.
        document_ids: [B, T] the document of each token; padding has its own document and no loss.
        first: offset of head 0's label.
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
