"""Acceptance, which decides from the target's scores which tokens of a draft tree are accepted.

Every rule starts at the root, the token that is already decided, and accepts a node only together with its ancestors.
The target is the distribution that the text must follow. A walk computes it only at the nodes that it reaches, for all
rows of the batch at one depth together; other rules read it at all nodes at once. docs/decoding.md has the proofs.

Shapes: B rows of the batch, R of them that a walk looks at, N draft nodes, M distributions of the target, each for one
or more of the R rows, V vocabulary, D the depth of the tree, C the most children of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft

Scores = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""(rows [R], nodes [R], their depth) -> scores [M, V] whose softmax is the target, each row's index into scores [R]."""
Decide = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R], scores [M, V], index [R]) -> the token that the target decides on in each row [R]."""
Passes = Callable[[Tensor], Tensor]
"""(the target's scores [..., V] after nodes) -> which tokens a lossy rule accepts there [..., V]."""


class Acceptance(NamedTuple):
    """The accepted path of nodes in each row of a batch, and the token that the target decided on after the path."""

    path: Tensor  # [B, D + 1] accepted nodes from the root on, padded with -1
    length: Tensor  # [B] the number of accepted nodes, the root included
    next_root: Tensor  # [B]
    end: Tensor  # [B] the last node of the path


def accept_greedy(draft: Draft, best: Tensor, depth_limit: Tensor | None = None) -> Acceptance:
    """Accept the longest path of nodes that equals the text of greedy decoding (Stern et al. 2018, here for trees).

    `best` [B, N] is the target's most probable token after each of N nodes in B rows. `depth_limit` [B] is the greatest
    depth at which a node may be accepted, because the context ends there; `None` means any depth."""
    topology = draft.topology
    match = draft.ids == best.gather(1, topology.parent.expand_as(draft.ids))
    accepted = (match[:, None, :] | topology.non_ancestors).all(-1)  # [B, N]: the node and all its ancestors match
    if depth_limit is not None:
        accepted &= topology.depth <= depth_limit[:, None]
    end = (accepted * topology.depth).argmax(-1)  # [B]; the root's depth is 0, and it is the first node
    return ended_at(draft, end, best.gather(1, end[:, None])[:, 0])


def accept_walk(
    draft: Draft, target: Scores, decide: Decide, depth_limit: Tensor | None = None, lazy: bool = True
) -> Acceptance:
    """Decide on one token at a time from the target's scores, and walk down the tree to the child with this token.

    If no child holds the decided token, the walk ends, and the token is the next root. `target` gives the scores after
    nodes, and `decide` takes a token from them: the most probable one, or a draw. No decided token is thrown away, so
    the text has exactly the target's distribution, whatever the draft. If the draft tree itself is not drawn at random,
    no lossless rule accepts more tokens on average. `lazy`: see `TreeWalk`."""
    walk, root = TreeWalk(draft, depth_limit, lazy), torch.zeros_like(draft.ids[:, 0])
    for depth in range(draft.topology.max_depth + 1):
        if not len(walk.rows):
            break
        scores, index = target(walk.rows, walk.nodes, depth)
        token = decide(walk.rows, scores, index).to(root.device)
        root[walk.rows] = torch.where(walk.walking, token, root[walk.rows])
        if depth < draft.topology.max_depth:
            walk.go_on(walk.child_that_holds(token, depth))
    return ended_at(draft, walk.end, root)


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
        found.append((*(each.flatten(1).gather(1, of_node) for each in judged), scores.argmax(-1)))
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

    def __init__(self, draft: Draft, depth_limit: Tensor | None, lazy: bool) -> None:
        self.draft, self.depth_limit, self.lazy = draft, depth_limit, lazy
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
        """Find, for each row, the child of its current node, at `depth`, that holds its `token` [R]; -1: none does."""
        if self.table is None:
            return torch.full_like(self.rows, -1)
        children = self.children(depth)
        held = self.draft.ids[self.rows[:, None], children.clamp_min(0)]
        return torch.where(held == token[:, None], children, -1).amax(-1)

    def go_on(self, child: Tensor) -> None:
        """Move rows to their `child` [R]; -1 ends a walk."""
        self.walking = child >= 0
        if self.lazy:
            self.rows, child = self.rows[self.walking], child[self.walking]
            self.walking = torch.ones_like(self.rows, dtype=torch.bool)
            self.end[self.rows] = child
        else:
            self.end = torch.where(self.walking, child, self.end)


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
