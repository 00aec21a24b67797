"""Rejection sampling of a sampled draft tree: accept a child with probability p / q, or go on with the residual of p.

p is the target's distribution, and q is the one from which a token was drafted. Sources: Leviathan et al. 2023 for one
draft token; SpecInfer and recursive rejection sampling (RRSw; Jeon et al. 2024) for siblings drawn without replacement.

Shapes: R rows whose walk has not ended, X some of these rows, M distributions that rows share, N nodes, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode.accept import Acceptance, Scores, TreeWalk, ended_at
from decode.draft import Draft
from decode.ops.draws import Draws


def accept_sampled(draft: Draft, target: Scores, draws: Draws, depth_limit: Tensor | None = None) -> Acceptance:
    """Accept nodes of a sampled tree by rejection sampling; the text has exactly the target's distribution.

    At each node of the walk down the tree, p is the target, and the children are tried in the order in which they were
    drawn from q. A child x is accepted with probability min(1, p(x) / q(x)). After a rejection, p becomes its residual
    max(0, p - q), normalised, and q loses x, as later siblings were drawn without x. If none is left, the next root is
    drawn from p. `draft.proposal` must hold q; top-k drafts lack it. `depth_limit` [B]: the greatest depth accepted."""
    assert draft.proposal is not None, "only a drawn draft can be rejected by p / q"
    (q, of_children), walk = draft.proposal, TreeWalk(draft, depth_limit)
    while len(walk.rows):
        scores, index = target(walk.rows, walk.nodes)
        q_of, shared = of_children[walk.rows, walk.nodes], len(scores) < len(index)
        at_first = Residuals(scores.softmax(-1), q.to(scores.device), index, q_of, shared)
        child, left = _first_accepted(draft, walk, at_first, draws)
        ends = child < 0
        walk.go_on(child, draws.tokens(walk.rows[ends], left.p, left.p_of[ends]))
    return ended_at(draft, walk.end, walk.root)


def _first_accepted(draft: Draft, walk: TreeWalk, residuals: Residuals, draws: Draws) -> tuple[Tensor, Residuals]:
    """Return the node index of the child that each unfinished row accepts [R], -1 for none, and the new residuals."""
    accepted = torch.full_like(walk.rows, -1)
    children = walk.children()
    for place, child in enumerate(children.T, 1):  # [R]: each row's first child, then each row's second, ...
        trying = ((child >= 0) & (accepted < 0)).nonzero()[:, 0]
        if not len(trying):
            continue
        token = draft.ids[walk.rows[trying], child[trying]]
        p = residuals.p[residuals.p_of[trying], token].double()
        q = residuals.q[residuals.q_of[trying], token].double()
        drawn = q > 0  # else nothing was left to draw, and a token is repeated (`draw_distinct`), which is skipped
        passes = passes_ratio(draws.uniforms(walk.rows[trying], 1)[:, 0], p, q) & drawn
        fails = ~passes & drawn
        accepted[trying[passes]] = child[trying[passes]]
        residuals = residuals.after_rejection(trying[fails], token[fails], was_last=place == children.shape[1])
    return accepted, residuals


class Residuals(NamedTuple):
    """Distributions of unfinished rows: row r has target `p[p_of[r]]`; its next sibling was drawn from `q[q_of[r]]`.

    Rows with the same path and the same rejected tokens share distributions. After a rejection, the new p is the same
    whichever token was rejected, and only q loses that token. So there are far fewer different p than q."""

    p: Tensor  # [Mp, V] the distinct target distributions
    q: Tensor  # [Mq, V] the distinct draft distributions
    p_of: Tensor  # [R] the index of each row's distribution in `p`
    q_of: Tensor  # [R] the index of each row's distribution in `q`
    shared: bool  # whether to look for rows that share a distribution, which does not pay for few rows

    def after_rejection(self, rows: Tensor, token: Tensor, was_last: bool) -> Residuals:
        """Update p and q of those unfinished rows, with indices `rows` [X], whose tokens `token` [X] were rejected.

        With `was_last`, no row has another sibling to try, so q is not computed."""
        if not len(rows):
            return self
        pair, own = _distinct(self.p_of[rows] * len(self.q) + self.q_of[rows], self.shared)
        p_of = self.p_of.index_copy(0, rows, len(self.p) + own)
        p = torch.cat([self.p, residual(self.p[pair // len(self.q)], self.q[pair % len(self.q)])])
        if was_last:
            return self._replace(p=p, p_of=p_of)
        size = self.q.shape[-1]
        pair, own = _distinct(self.q_of[rows] * size + token, self.shared)
        q_of = self.q_of.index_copy(0, rows, len(self.q) + own)
        q = torch.cat([self.q, without(self.q[pair // size], pair % size)])
        return Residuals(p, q, p_of, q_of, self.shared)


def passes_ratio(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Whether u < p / q, for u in [0, 1): true with probability min(1, p / q), if u is uniform."""
    return u * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The normalised max(0, p - q) of M pairs [M, V]: a distribution to draw from after a draw from q was rejected."""
    rest = (p - q).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    # If no mass is left, rounding caused the rejection: p equals q, and a draw from either is right.
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """Remove one token [M] from each distribution of q [M, V], and normalise q; zeros if nothing is left."""
    rest = q.scatter(1, token[:, None], 0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def _distinct(key: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    """Find the distinct values of `key` [R] and each key's index in them; without `shared`, duplicates are kept."""
    if shared:
        return key.unique(return_inverse=True)
    return key, torch.arange(len(key), device=key.device)
