"""Rejection sampling of a sampled draft tree: accept a child with probability p / q, or go on with the residual of p.

p is the target's distribution, and q is the one from which a token was drafted. Sources: Leviathan et al. 2023 for one
draft token; SpecInfer and recursive rejection sampling (RRSw; Jeon et al. 2024) for siblings drawn without replacement.

Shapes: B rows of the batch, R of them that a walk looks at, M distributions that rows share, N nodes of depth at most D
with at most C children, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode.accept import Acceptance, Scores, TreeWalk, ended_at
from decode.draft import Draft
from decode.ops.draws import Draws, cumulative, invert


def accept_sampled(
    draft: Draft, target: Scores, draws: Draws, depth_limit: Tensor | None = None, lazy: bool = True
) -> Acceptance:
    """Accept nodes of a sampled tree by rejection sampling; the text has exactly the target's distribution.

    At each node of the walk down the tree, p is the target, and the children are tried in the order in which they were
    drawn from q. A child x is accepted with probability min(1, p(x) / q(x)). After a rejection, p becomes its residual
    max(0, p - q), normalised, and q loses x, as later siblings were drawn without x. If none is left, the next root is
    drawn from p. `draft.proposal` must hold q; top-k drafts lack it. `depth_limit` [B]: the greatest depth accepted.
    `lazy`: see `TreeWalk`. Each row uses the same number of `draws` in every step on the same tree."""
    assert draft.proposal is not None, "only a drawn draft can be rejected by p / q"
    (q, of_children), walk, widths = draft.proposal, TreeWalk(draft, depth_limit, lazy), draft.topology.widths
    *tries, last = draws.uniforms(walk.rows, sum(widths) + 1).split([*widths, 1], dim=1)
    found: list[Tensor] = []  # distributions, from some of which the next roots are drawn
    left, known, shared = torch.zeros_like(walk.rows), 0, False  # `left` [B]: the index of each row's distribution
    for depth in range(draft.topology.max_depth + 1):
        if not len(walk.rows):
            break
        scores, index = target(walk.rows, walk.nodes, depth)
        shared |= len(scores) < len(index)
        residuals = Residuals(scores.softmax(-1), q, index, of_children[walk.rows, walk.nodes], shared)
        child = torch.full_like(walk.rows, -1)
        if depth < draft.topology.max_depth:
            child, residuals = _first_accepted(draft, walk, depth, residuals, tries[depth].index_select(0, walk.rows))
        left[walk.rows] = torch.where(walk.walking, known + residuals.p_of, left[walk.rows])
        known += len(residuals.p)
        found.append(residuals.p)
        walk.go_on(child)
    used, own = left.unique(return_inverse=True) if shared else (left, torch.arange(len(left), device=left.device))
    return ended_at(draft, walk.end, invert(cumulative(torch.cat(found)[used]), own, last[:, 0]))


def _first_accepted(
    draft: Draft, walk: TreeWalk, depth: int, residuals: Residuals, u: Tensor
) -> tuple[Tensor, Residuals]:
    """Return the node index of the child that each row accepts [R], -1 for none, and the new residuals.

    `u` [R, most children at this depth]: a uniform random number for each trial."""
    accepted, children, most = torch.full_like(walk.rows, -1), walk.children(depth), u.shape[1]
    for place in range(most):  # each row's first child, then each row's second, ...
        child = children[:, place]
        trying = (child >= 0) & (accepted < 0)
        if walk.lazy and not trying.any():
            break
        token = draft.ids[walk.rows, child.clamp_min(0)]
        p = residuals.p[residuals.p_of, token].double()
        q = residuals.q[residuals.q_of, token].double()
        tried = trying & (q > 0)  # else nothing was left to draw, and a token is repeated (`draw_distinct`)
        passes = passes_ratio(u[:, place], p, q)
        accepted, fails = torch.where(tried & passes, child, accepted), tried & ~passes
        if not walk.lazy or fails.any():
            residuals = residuals.after_rejection(fails, token, was_last=place + 1 == most)
    return accepted, residuals


class Residuals(NamedTuple):
    """Distributions of R rows: row r has target `p[p_of[r]]`; its next sibling was drawn from `q[q_of[r]]`.

    Rows with the same path and the same rejected tokens share distributions. After a rejection, the new p is the same
    whichever token was rejected, and only q loses that token. So there are far fewer different p than q."""

    p: Tensor  # [Mp, V] the distinct target distributions
    q: Tensor  # [Mq, V] the distinct draft distributions
    p_of: Tensor  # [R] the index of each row's distribution in `p`
    q_of: Tensor  # [R] the index of each row's distribution in `q`
    shared: bool  # whether rows share distributions; looking for them makes the host wait, and pays for many rows only

    def after_rejection(self, fails: Tensor, token: Tensor, was_last: bool) -> Residuals:
        """Update p and q of the rows [R] that are true in `fails`, because their tokens `token` [R] were rejected.

        With `was_last`, no row has another sibling to try, so q is not computed."""
        if not self.shared:
            p, q, own = self.p[self.p_of], self.q[self.q_of], torch.arange(len(fails), device=fails.device)
            p = torch.where(fails[:, None], residual(p, q), p)
            if not was_last:
                q = torch.where(fails[:, None], without(q, token), q)
            return Residuals(p, q, own, own, shared=False)
        rows = fails.nonzero()[:, 0]
        pair, own = (self.p_of[rows] * len(self.q) + self.q_of[rows]).unique(return_inverse=True)
        p_of = self.p_of.index_copy(0, rows, len(self.p) + own)
        p = torch.cat([self.p, residual(self.p[pair // len(self.q)], self.q[pair % len(self.q)])])
        if was_last:
            return self._replace(p=p, p_of=p_of)
        size = self.q.shape[-1]
        pair, own = (self.q_of[rows] * size + token[rows]).unique(return_inverse=True)
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
