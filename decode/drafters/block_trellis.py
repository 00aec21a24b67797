"""Drafts with block drafters whose guesses depend on the token before (`medusa.heads.dflash`: DSpark, DFlash 2).

One pass gives the logits of all heads without edges. The M best tokens of each head are its candidates, and the edges
between them make the trellis of `TrellisDrafter`. The first head's edges begin at the root. Markov edges change its
logits before the candidates are chosen, and pairwise edges those of the candidates, as the published drafters do.

Shapes: B texts, K heads (as many as the tree is deep), M candidates of a head, H hidden size, R rank of the edges, V
the heads' vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import Frontier
from decode.drafters.trellis import TrellisDrafter
from decode.ops.fast_topk import TopK
from medusa.heads.dflash import DflashHeads
from medusa.heads.inputs import HeadInputs


class Pass(NamedTuple):
    """What the edges read of a pass over the block."""

    x: Tensor  # [K, B, H] what the LM head reads
    root: Tensor  # [B, R] the code of the root, of which the first head's edges are products


class BlockTrellisDrafter(TrellisDrafter):
    """Drafts trees over the candidates of a block drafter."""

    heads: DflashHeads  # type: ignore[assignment]  # the look-ups are those of Markov heads, and the scores are not

    def alone(self, frontier: Frontier) -> tuple[Tensor, Pass]:
        heads, depth = self.heads, self.tree.max_depth
        root = self.embed(frontier.root[:, None]).expand(-1, depth, -1)
        features = heads.features(HeadInputs(self.hidden(frontier), root, frontier.context_kv), depth)
        x, codes = features.split([heads.config.hidden_size, heads.rank], dim=-1)
        logits = heads.unary(x, self.lm_head)
        if heads.project is None:
            first = logits[:1] + codes[:1] @ self.after.T
            logits = torch.cat([first, logits[1:].to(first.dtype)])
        return logits, Pass(x, codes[0])

    @property
    def after(self) -> Tensor:
        """W2 [V, R]."""
        assert self.heads.after is not None
        return self.heads.after

    def first(self, known: Pass, ids: Tensor, best: TopK) -> Tensor:
        if self.heads.project is None:
            return best.values[0]
        guesses = F.embedding(best.indices[0].to(self.heads.device), self.after)  # [B, M, R]
        return best.values[0] + (guesses @ known.root[:, :, None])[..., 0]

    def edges(self, known: Pass, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        assert self.heads.before is not None
        before = F.embedding(ids[:-1].to(self.heads.device), self.heads.before)  # [K - 1, B, M, R]
        guesses = F.embedding(places[1:].to(self.heads.device), self.after)
        return self.heads.codes(known.x[1:, :, None], before).flatten(0, 1), guesses.flatten(0, 1)
