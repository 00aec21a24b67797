"""What heads learn: the tokens of the text, or those of the backbone, or its whole distributions over tokens.

Head k (from 0) at position t learns about token t + k + 2, because the backbone's own LM head predicts token t + 1.

    ids       a b c d e | f g         two documents
    head 0    c d e . . | . .
    head 1    d e . . . | . .         a dot: no label, because the token would lie beyond the document's end

The backbone's own prediction of token t + k + 2 is its LM head applied to its hidden state at t + k + 1. Heads need
these hidden states anyway, so learning from the backbone costs no further forward.

Shapes: B rows, T tokens; N = B T positions of a batch, R of them with a label, C of these in a chunk; K heads, H hidden
size, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.argmax import argmax
from medusa.backbone import Backbone
from medusa.vocabulary import ABSENT, places_of
from train.loss.objectives import Acceptance

IGNORE = -100  # a label that does not count in the loss, as in PyTorch
FIRST_OFFSET = 2  # from a position to the label of head 0
NEXT = 1  # from a position to the label of the backbone's own LM head
CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
"""Size of a chunk's float32 logits, of all heads together: they fit into a CPU core's cache, or keep a GPU busy."""
MIN_VECTORS = 256  # with fewer of them, reading the LM head takes longer than multiplying by it, for any V
MIN_ROWS_OWN = {"cpu": 40, "cuda": 1024}
"""With own LM heads, every chunk also reads and writes the gradients of their weights, which a GPU does as fast as the
products of some hundred positions."""
MIN_ROWS = 24  # of a chunk with own LM heads, each of which is multiplied by a chunk's positions only
MOST_BYTES_OWN = 2 << 30  # of the logits of a chunk; for large vocabularies, this limit comes before `MIN_ROWS_OWN`


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


def taught_labels(input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Find the labels [K, R] of K heads, and the positions [R] at which they learn, as indices among the N positions.

    The arguments are those of `head_labels`. The positions are those at which head 0 has a label: without one, no
    decoding step starts there, so the other heads need none."""
    labels = head_labels(input_ids, loss_mask, document_ids, num_heads).flatten(1)
    places = (labels[0] != IGNORE).nonzero()[:, 0]
    return labels[:, places], places


def chunk_rows(num_heads: int, vocab_size: int, device: str, own: bool = False) -> int:
    """Number of positions in a chunk on `device`, "cpu" or "cuda"; `own`: each head has an LM head that learns."""
    kind = device if device in CHUNK_BYTES else "cuda"
    position = 4 * num_heads * vocab_size
    rows = CHUNK_BYTES[kind] // position
    if own:
        return max(rows, min(MIN_ROWS_OWN[kind], max(MIN_ROWS, MOST_BYTES_OWN // position)))
    return max(rows, ceil(MIN_VECTORS / num_heads))


@torch.no_grad()
def backbone_choices(backbone: Backbone, hidden: Tensor, labels: Tensor, places: Tensor) -> Tensor:
    """Replace the labels [K, R] at the positions `places` [R] (`taught_labels`) by the backbone's greedy choices.

    The choice for a token is made from the hidden state, in `hidden` [N, H] of size H, at the position before."""
    taught = labels != IGNORE
    reach = torch.arange(len(labels), device=places.device)[:, None] + (FIRST_OFFSET - 1)
    before, which = (places + reach)[taught].unique(return_inverse=True)
    rows = chunk_rows(1, backbone.vocab_size, hidden.device.type)
    chosen = torch.cat([argmax(backbone.lm_head(part)) for part in hidden[before.to(hidden.device)].split(rows)])
    return labels.masked_scatter(taught, chosen.to(labels.device)[which])


class SoftTargets(NamedTuple):
    """The backbone's distributions over tokens as targets of K heads at C positions, and their best tokens."""

    distributions: Tensor  # [D, V] D distributions over V tokens; positions share them, so D is about C + K
    which: Tensor  # [K, C] index of the distribution that each head learns at each position
    labels: Tensor
    """Most probable token [K, C] of the distribution in `which`, as an index into the heads' vocabulary. `IGNORE` where
    a head has no label. Where the token is not in that vocabulary: `ABSENT` with `acceptance`, else `IGNORE`."""
    acceptance: Acceptance | None = None  # how the loss is made from the distributions; `None`: cross-entropy
    temperature: float = 1.0  # by which the heads' logits are divided


@dataclass(frozen=True)
class BackboneTeacher:
    """The backbone's distributions as targets for the heads, computed for one chunk of positions at a time."""

    hidden: Tensor  # [N, H] hidden states of the backbone at all positions of a batch, row after row
    position: Tensor  # [R] indices of the positions at which heads have labels, among the N positions
    lm_head: nn.Module
    temperature: float = 1.0  # of the distributions; with `acceptance`, also of the heads, as in decoding
    hard_label_weight: float = 0.0  # share of the target's probability that is moved to the most probable token
    vocabulary: Tensor | None = None
    """Ids of the tokens that the heads guess among, if not all. Distributions are then restricted to these tokens, in
    this order, and normalised, but not with `acceptance`: other tokens are never accepted."""
    acceptance: Acceptance | None = None  # the objective, if it is not the cross-entropy

    @torch.no_grad()
    def targets(self, rows: slice, labels: Tensor) -> SoftTargets:
        """Compute the distributions that K heads learn at C of the R positions with labels, selected by `rows`.

        Of `labels` [K, C], only the places of `IGNORE` are used; the returned labels are the backbone's best tokens."""
        reach = torch.arange(len(labels), device=labels.device)[:, None] + (FIRST_OFFSET - 1)
        wanted = (self.position[rows] + reach).clamp_max(len(self.hidden) - 1)  # beyond the end there are no labels
        places, which = wanted.unique(return_inverse=True)
        soft = self.lm_head(self.hidden[places]).float().div_(self.temperature)
        best = argmax(soft)
        if self.acceptance is not None:
            soft = soft.softmax(-1)
        if self.vocabulary is not None:
            best = places_of(self.vocabulary, best, soft.shape[-1])
            soft = soft[:, self.vocabulary.to(soft.device)]
        known = best != ABSENT
        # If the best token is not in the vocabulary, other tokens can still be accepted in sampling.
        taught = (labels != IGNORE) & (known[which] | (self.acceptance is not None))
        labels = torch.where(taught, best[which], IGNORE)
        if self.acceptance is None:
            soft = soft.softmax(-1)
        if self.hard_label_weight:
            soft.mul_(1 - self.hard_label_weight)
            soft.scatter_add_(1, best.clamp_min(0)[:, None], (self.hard_label_weight * known.to(soft))[:, None])
        own = 1.0 if self.acceptance is None else self.temperature
        return SoftTargets(soft, which, labels, self.acceptance, own)
