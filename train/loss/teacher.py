"""What heads learn from the backbone: its most probable tokens, or its whole distributions over tokens.

Head k (from 0) at position t learns about token t + k + 2 (`train.loss.labels`). The backbone's own prediction of that
token is its LM head applied to its hidden state at t + k + 1. Heads need these hidden states anyway, so learning from
the backbone costs no further forward.

Shapes: B rows, T tokens; N = B T positions of a batch, R of them with a label, C of these in a chunk; K heads, H hidden
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
from train.loss.labels import FIRST_OFFSET, IGNORE


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
