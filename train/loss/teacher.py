"""The backbone as a teacher: its distributions (objective distill) and its most probable tokens (objective argmax).

Head k at position t is taught about the token at t + k + 2. The backbone's own prediction of that token is its LM head
on its hidden state at t + k + 1. Heads need these hidden states anyway, so teaching costs no further forward.

Shapes: K heads, R positions that are taught, C of them in a chunk, N positions of a batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.vocabulary import places_of
from train.labels import FIRST_OFFSET, IGNORE
from train.loss.chunks import chunk_rows


class SoftTargets(NamedTuple):
    """What heads learn at a chunk of positions."""

    distributions: Tensor
    """[D, V] distributions; neighbouring positions share them, so D is about C + K."""
    which: Tensor
    """[K, C] which distribution a head learns."""
    labels: Tensor
    """[K, C] the most probable token of each distribution, as a place in the heads' vocabulary; IGNORE where it is not
    in that vocabulary or nothing is taught."""


@dataclass(frozen=True)
class Teacher:
    """The backbone's own distributions, a few positions at a time."""

    hidden: Tensor
    """[N, H] hidden states at all positions of a batch, rows one after another."""
    position: Tensor
    """[R] index among the N positions of each one that is taught."""
    lm_head: nn.Module
    temperature: float = 1.0
    hard_label_weight: float = 0.0
    """Share of the target that goes to the most probable token, whatever its probability."""
    vocabulary: Tensor | None = None
    """Tokens that the heads guess among; distributions are then conditional on one of them, in their order."""

    @torch.no_grad()
    def targets(self, rows: slice, labels: Tensor) -> SoftTargets:
        """What heads learn at the taught positions `rows`, where `labels` [K, C] is not IGNORE."""
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


@torch.no_grad()
def backbone_choices(backbone: Backbone, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """The backbone's most probable token at each position of a text [B, T], from its hidden states [B, T, H].

    On sampled text this is the token that greedy decoding takes after that prefix. The first position keeps its token.
    """
    flat = hidden[:, :-1].flatten(0, 1)
    rows = chunk_rows(1, backbone.vocab_size, flat.device.type)
    chosen = torch.cat([backbone.lm_head(part).argmax(-1) for part in flat.split(rows)])
    return torch.cat([input_ids[:, :1], chosen.reshape(len(input_ids), -1)], dim=1)
