"""Acceptance, which decides from the target's scores which tokens of a draft tree are accepted.

Every rule starts at the root, the token that is already decided, and accepts a node only together with its ancestors.
The target p is the distribution that the text must follow, and q is the one from which a token of a sampled draft was
drawn. A walk computes p only at the nodes that it reaches, for all rows of the batch at one depth together; other rules
read it at all nodes at once. docs/decoding.md has the proofs.

Shapes: B rows of the batch, R of them that a walk looks at, N draft nodes, M distributions, each for one or more of the
R rows, V vocabulary, D the depth of the tree, C the most children of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft
from decode.ops.draws import Draws, best_of, cumulative, invert

Scores = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(rows [R], nodes [R], their depth) -> scores [M, V] whose softmax is the target, each row's index into scores [R]."""
Decide = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R], scores [M, V], index [R]) -> the token that the target decides on in each row [R]."""
Passes = Callable[[Tensor], Tensor]
"""(the target's scores [..., V] after nodes) -> which tokens a lossy rule accepts there [..., V]."""


class Acceptance(NamedTuple):
    """The accepted path of nodes in each row of a batch, and the token that the target decided on after the path."""

    path: Tensor  # [B, D + 1] accepted nodes from the root on, padded with -1
    length: Tensor  # [B] the number of accepted nodes, the root included; 0 in compiled steps that wait for the host
    next_root: Tensor  # [B] its id, `NO_TOKEN`, or in compiled steps `UNDECIDED`
    end: Tensor  # [B] the last node of the path


def accept_greedy(draft: Draft, best: Tensor, depth_limit: Tensor | None = None) -> Acceptance:
    """Accept the longest path of nodes that equals the text of greedy decoding (Stern et al. 2018, here for trees).

    `best` [B, N] is the target's most probable token after each node. `depth_limit` [B], in all rules, is the greatest
    depth at which a node may be accepted, because the context ends there; `None` means any depth."""
    topology = draft.topology
    match = draft.ids == best.gather(1, topology.parent.expand_as(draft.ids))
    accepted = (match[:, None, :] | topology.non_ancestors).all(-1)  # [B, N]: the node and its ancestors match
    if depth_limit is not None:
        accepted &= topology.depth <= depth_limit[:, None]
    end = (accepted * topology.depth).argmax(-1)  # [B]; the root's depth is 0, and it is the first node
    return ended_at(draft, end, best.gather(1, end[:, None])[:, 0])


def accept_walk(
    draft: Draft,
    target: Scores,
    decide: Decide,
    depth_limit: Tensor | None = None,
    lazy: bool = True,
    ends: Tensor | None = None,
) -> Acceptance:
    """Decide on one token at a time from the target's scores, and walk down the tree to the child with this token.

    If no child holds the decided token, the walk ends, and the token is the next root. `target` gives the scores after
    nodes, and `decide` takes a token from them: the most probable one, or a draw. No decided token is thrown away, so
    the text has exactly the target's distribution, whatever the draft, if it does not depend on these draws. If the
    draft tree is not drawn at random, no lossless rule accepts more tokens on average. `lazy`, `ends`: see `TreeWalk`.
    """
    walk, root = TreeWalk(draft, depth_limit, lazy, ends), torch.zeros_like(draft.ids[:, 0])
    for depth in range(draft.topology.max_depth + 1):
        if not len(walk.rows):
            break
        scores, index = target(walk.rows, walk.nodes, depth)
        token = decide(walk.rows, scores, index).to(root.device)
        root[walk.rows] = torch.where(walk.walking, token, root[walk.rows])
        if depth < draft.topology.max_depth:
            walk.go_on(walk.child_that_holds(token, depth))
    return ended_at(draft, walk.end, root)


def accept_sampled(
    draft: Draft,
    target: Scores,
    draws: Draws,
    depth_limit: Tensor | None = None,
    lazy: bool = True,
    ends: Tensor | None = None,
) -> Acceptance:
    """Accept nodes of a sampled tree by rejection sampling; the text has exactly the target's distribution.

    At each node of the walk down the tree, the children are tried in the order in which they were drawn from q. A child
    x is accepted with probability min(1, p(x) / q(x)). After a rejection, p becomes its residual max(0, p - q),
    normalised, and q loses x, as later siblings were drawn without x. If none is left, the next root is drawn from p.
    `draft.proposal` must hold q. Each row uses the same number of `draws` in every step on the same tree.

    Sources: Leviathan et al. 2023 for one draft token; SpecInfer and recursive rejection sampling (RRSw; Jeon et al.
    2024) for siblings drawn without replacement."""
    assert draft.proposal is not None, "only a drawn draft can be rejected by p / q"
    (q, of_children), walk, widths = draft.proposal, TreeWalk(draft, depth_limit, lazy, ends), draft.topology.widths
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
    """Return the child that each row accepts [R], -1 for none, and the new residuals; `u` [R, trials] is uniform."""
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

    After a rejection, the new p is the same whichever token was rejected, and only q loses that token. So rows with the
    same path share distributions, and there are far fewer different p than q."""

    p: Tensor  # [Mp, V] the distinct target distributions
    q: Tensor  # [Mq, V] the distinct draft distributions
    p_of: Tensor  # [R] the index of each row's distribution in `p`
    q_of: Tensor  # [R] the index of each row's distribution in `q`
    shared: bool  # whether rows share distributions; looking for them makes the host wait, and pays for many rows only

    def after_rejection(self, fails: Tensor, token: Tensor, was_last: bool) -> Residuals:
        """Update p and q of the rows [R] that are true in `fails`, whose tokens `token` [R] were rejected.

        `was_last`: no row has another sibling to try, so q is not needed."""
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


def accept_longest(
    draft: Draft, target: Iterable[Tensor], passes: Passes, depth_limit: Tensor | None = None
) -> Acceptance:
    """Accept the longest path of tokens that pass a lossy rule; of equally long paths, the target's most probable one.

    `target` gives the target's scores [b, N, V] after all nodes, for the B rows in order, in parts of b rows. `passes`
    finds in them the tokens that the lossy rule accepts after each node. The next root is the target's most probable
    token after the path."""
    topology, ids = draft.topology, draft.ids
    parent, found = topology.parent.expand_as(ids), []
    start = 0
    for scores in target:
        rows = slice(start, start + len(scores))
        of_node = parent[rows] * scores.shape[-1] + ids[rows]  # each node's token, after its parent
        judged = (passes(scores), scores.log_softmax(-1))
        found.append((*(each.flatten(1).gather(1, of_node) for each in judged), best_of(scores)))
        start = rows.stop
    fits, log_p, best = map(torch.cat, zip(*found, strict=True))
    no_part = topology.non_ancestors
    accepted = (fits[:, None] | no_part).all(-1)
    if depth_limit is not None:
        accepted &= topology.depth <= depth_limit[:, None]
    depth = torch.where(accepted, topology.depth, -1)
    path_log_p = torch.where(no_part, 0.0, log_p[:, None]).sum(-1)
    end = torch.where(depth == depth.amax(-1, keepdim=True), path_log_p, -torch.inf).argmax(-1)
    return ended_at(draft, end, best.gather(1, end[:, None])[:, 0])


class TreeWalk:
    """The walk of B rows down their draft trees, one depth at a time; each row's walk ends at its own depth.

    A `lazy` walk leaves out rows that have ended and stops with the last one, for which the host reads from the device
    at each depth. Else all B rows go down to the greatest depth, and what is decided for ended rows has no effect."""

    def __init__(self, draft: Draft, depth_limit: Tensor | None, lazy: bool, ends: Tensor | None = None) -> None:
        """Begin at the roots. `ends` [B, N]: nodes at which a text ends, so that nothing is decided after them."""
        self.draft, self.depth_limit, self.lazy, self.ends = draft, depth_limit, lazy, ends
        self.end = torch.zeros_like(draft.ids[:, 0])  # [B] the node that each row has reached
        self.rows = torch.arange(len(self.end), device=self.end.device)  # [R] the rows that the walk looks at
        self.walking = torch.ones_like(self.rows, dtype=torch.bool)  # [R] whether each row's walk goes on
        self.table = draft.topology.children() if draft.topology.max_children else None

    @property
    def nodes(self) -> Tensor:
        """The draft node [R] that each of the R rows has reached in its walk."""
        return self.end.index_select(0, self.rows)

    def children(self, depth: int) -> Tensor:
        """Children [R, C] of the nodes at `depth` that the rows have reached.

        -1 stands for no child, one beyond `depth_limit`, or a walk that has ended."""
        goes_on = self.walking
        if self.depth_limit is not None:
            goes_on = goes_on & (self.depth_limit.index_select(0, self.rows) > depth)
        assert self.table is not None, "no node of the draft has children"
        return torch.where(goes_on[:, None], self.draft.topology.at(self.table, self.rows, self.nodes), -1)

    def child_that_holds(self, token: Tensor, depth: int) -> Tensor:
        """Find the child of each row's node, at `depth`, that holds its `token` [R]; -1: none does."""
        if self.table is None:
            return torch.full_like(self.rows, -1)
        children = self.children(depth)
        held = self.draft.ids[self.rows[:, None], children.clamp_min(0)]
        return torch.where(held == token[:, None], children, -1).amax(-1)

    def go_on(self, child: Tensor) -> None:
        """Move rows to their `child` [R]; -1 ends a walk."""
        self.end[self.rows] = torch.where(child >= 0, child, self.nodes)
        self.walking = child >= 0
        if self.ends is not None:
            self.walking = self.walking & ~self.ends[self.rows, self.nodes]
        if self.lazy:
            self.rows = self.rows[self.walking]
            self.walking = torch.ones_like(self.rows, dtype=torch.bool)


def ended_at(draft: Draft, end: Tensor, next_root: Tensor) -> Acceptance:
    """Make the `Acceptance` of B paths from the root to the nodes `end` [B], with the tokens `next_root` after them."""
    topology = draft.topology
    rows = end if topology.is_shared else torch.arange(len(end), device=end.device)  # a shared topology reads no rows
    length = topology.at(topology.depth, rows, end) + 1
    return Acceptance(topology.at(topology.paths, rows, end), length, next_root, end)


def pack(draft: Draft, accepted: Acceptance) -> Tensor:
    """Pack each row's path length, next root and token ids of the path into one tensor, for one copy to the host."""
    ids = draft.ids.gather(1, accepted.path.clamp_min(0))
    return torch.cat([accepted.length[:, None], accepted.next_root[:, None], ids], dim=1)


def at_end(hidden: Tensor, accepted: Acceptance) -> Tensor:
    """Select the hidden states [B, H] at the ends of the accepted paths, from those of all N nodes, [B, N, H]."""
    end = accepted.end.to(hidden.device)
    return hidden.gather(1, end[:, None, None].expand(-1, -1, hidden.shape[-1]))[:, 0]
