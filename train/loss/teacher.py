"""The targets that heads learn from the backbone: its most probable tokens, or its whole distributions over tokens.

Head k (from 0) at position t learns about token t + k + 2 (`train.loss.labels`). The backbone's own prediction of that
token is its LM head applied to its hidden state at t + k + 1. Heads need these hidden states anyway, so learning from
the backbone costs no further forward.

Shapes: B rows, T tokens; N = B T positions of a batch, R of them with a label, C of these in a chunk; K heads, H hidden
size, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.argmax import argmax
from medusa.backbone import Backbone
from medusa.vocabulary import ABSENT, places_of
from train.loss.acceptance import Acceptance
from train.loss.chunks import chunk_rows
from train.loss.labels import FIRST_OFFSET, IGNORE


@torch.no_grad()
def backbone_choices(backbone: Backbone, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """Replace each token in `input_ids` [B, T], except the first of each row, by the backbone's greedy choice.

    The choice for a position is made from the hidden state, in `hidden` [B, T, H] of size H, at the position before."""
    flat = hidden[:, :-1].flatten(0, 1)
    rows = chunk_rows(1, backbone.vocab_size, flat.device.type)
    chosen = torch.cat([argmax(backbone.lm_head(part)) for part in flat.split(rows)])
    return torch.cat([input_ids[:, :1], chosen.reshape(len(input_ids), -1)], dim=1)


class SoftTargets(NamedTuple):
    """The targets of K heads at C positions: the backbone's distributions over tokens, and their best tokens."""

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
