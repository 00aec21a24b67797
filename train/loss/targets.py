"""What heads are taught: tokens at an offset from each position, or the backbone's distributions over them.

Head k (from 0) at position t is taught token t + k + 2, since the backbone's own LM head already predicts t + 1. No
other file knows this offset.

    ids       a b c d e | f g         two documents
    head 0    c d e . . | . .
    head 1    d e . . . | . .         never across a document's end, never from padding

The backbone's own prediction of token t + k + 2 is its LM head on its hidden state at t + k + 1. Heads need these
hidden states anyway, so learning from the backbone's distributions costs no further forward.

Shapes: K heads, B rows, T tokens, R positions that are taught, C of them in a chunk, N positions of a batch, H hidden
size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.vocabulary import places_of
from train.loss.chunks import chunk_rows

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


@torch.no_grad()
def backbone_choices(backbone: Backbone, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """The backbone's most probable token at each position of a text [B, T], from its hidden states [B, T, H].

    On sampled text this is the token that greedy decoding takes after that prefix. The first position keeps its token.
    """
    flat = hidden[:, :-1].flatten(0, 1)
    rows = chunk_rows(1, backbone.vocab_size, flat.device.type)
    chosen = torch.cat([backbone.lm_head(part).argmax(-1) for part in flat.split(rows)])
    return torch.cat([input_ids[:, :1], chosen.reshape(len(input_ids), -1)], dim=1)


class SoftTargets(NamedTuple):
    """The distributions that heads learn at a chunk of positions."""

    distributions: Tensor
    """[D, V] distributions; neighbouring positions share them, so D is about C + K."""
    which: Tensor
    """[K, C] index of the distribution that each head learns."""
    labels: Tensor
    """[K, C] most probable token of each distribution, as a place in the heads' vocabulary; IGNORE if the token is not
    in that vocabulary or nothing is taught."""


@dataclass(frozen=True)
class BackboneTeacher:
    """The backbone's own distributions, computed for a few positions at a time."""

    hidden: Tensor
    """[N, H] hidden states at all positions of a batch, one row after another."""
    position: Tensor
    """[R] index among the N positions of each one that is taught."""
    lm_head: nn.Module
    temperature: float = 1.0
    hard_label_weight: float = 0.0
    """Share of the target that goes to the most probable token alone."""
    vocabulary: Tensor | None = None
    """Tokens that the heads guess among; distributions are then conditional on these tokens, in their order."""

    @torch.no_grad()
    def targets(self, rows: slice, labels: Tensor) -> SoftTargets:
        """The targets at the taught positions `rows`, where `labels` [K, C] is not IGNORE."""
        reach = torch.arange(len(labels), device=labels.device)[:, None] + (FIRST_OFFSET - 1)
        wanted = (self.position[rows] + reach).clamp_max(len(self.hidden) - 1)  # beyond the end nothing is taught
        places, which = wanted.unique(return_inverse=True)
        soft = self.lm_head(self.hidden[places]).float()
        best = soft.argmax(-1)
        if self.vocabulary is not None:
            best = places_of(self.vocabulary, best, soft.shape[-1])
            soft = soft[:, self.vocabulary.to(soft.device)]
        labels = torch.where((labels == IGNORE) | (best[which] < 0), IGNORE, best[which])
        soft = soft.div_(self.temperature).softmax(-1)
        if self.hard_label_weight:
            soft.mul_(1 - self.hard_label_weight)
            soft.scatter_add_(1, best.clamp_min(0)[:, None], torch.full_like(soft[:, :1], self.hard_label_weight))
        return SoftTargets(soft, which, labels)
