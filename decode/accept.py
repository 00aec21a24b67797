"""Acceptance rules, which decide from the target's scores which tokens of a draft tree are accepted.

Every rule walks down the draft tree from the root, the token that is already decided, and accepts a node only together
with its ancestors. The target is the distribution that the text must follow. A walk computes it only at the nodes that
it reaches, for all rows of the batch at one depth together. docs/exactness.md has the proofs.

Shapes: B rows of the batch, R of them whose walk has not ended, N draft nodes, M distributions of the target, each for
one or more of the R rows, V vocabulary, D the depth of the tree, C the most children of a node."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft

Scores = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rows [R], nodes [R]) -> scores [M, V] whose softmax is the target, and each row's index into scores [R]."""
Decide = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R], scores [M, V], index [R]) -> the token that the target decides on in each row [R]."""
Passes = Callable[[Tensor], Tensor]
"""(the target's scores [V] after a node) -> which tokens a lossy rule accepts there [V]."""


class Truncation(NamedTuple):
    """Constants of sampled typical acceptance, a lossy rule that samples only from the target's `typical` tokens."""

    epsilon: float
    delta: float


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
    end = torch.where(accepted, topology.depth, -1).argmax(-1)  # [B]
    return ended_at(draft, end, best.gather(1, end[:, None])[:, 0])


def accept_walk(draft: Draft, target: Scores, decide: Decide, depth_limit: Tensor | None = None) -> Acceptance:
    """Decide on one token at a time from the target's scores, and walk down the tree to the child with this token.

    If no child holds the decided token, the walk ends, and the token is the next root. `target` gives the scores after
    nodes, and `decide` takes a token from them: the most probable one, or a draw. No decided token is thrown away, so
    the text has exactly the target's distribution, whatever the draft. If the draft tree itself is not drawn at random,
    no lossless rule accepts more tokens on average."""
    walk = TreeWalk(draft, depth_limit)
    while len(walk.rows):
        scores, index = target(walk.rows, walk.nodes)
        token = decide(walk.rows, scores, index)
        child = walk.child_that_holds(token)
        walk.go_on(child, token[child < 0])
    return ended_at(draft, walk.end, walk.root)


def accept_longest(draft: Draft, target: Scores, passes: Passes, depth_limit: Tensor | None = None) -> Acceptance:
    """Accept the longest path of tokens that pass a lossy rule; of equally long paths, the target's most probable one.

    `passes` finds the tokens that the lossy rule accepts, from the target's scores after a node. The next root is the
    target's most probable token after the path."""
    topology, end, roots = draft.topology, [], []
    tables = topology.children.tolist()
    limits = [topology.max_depth] * len(draft.ids) if depth_limit is None else depth_limit.tolist()
    for row, tokens in enumerate(draft.ids.tolist()):
        children = tables[0 if topology.is_shared else row]
        found: list[tuple[int, float, int, int]] = []  # length, log probability, node, next root
        open_nodes = [(0, 0, 0.0)]  # node, depth, log probability
        while open_nodes:
            node, depth, log_p = open_nodes.pop()
            scores, index = target(draft.ids.new_tensor([row]), draft.ids.new_tensor([node]))
            here = scores[index[0]]
            found.append((depth, log_p, node, int(here.argmax())))
            if depth == limits[row] or children[node][:1] in ([], [-1]):
                continue
            fits, log_probabilities = passes(here), here.log_softmax(-1)
            for child in children[node]:
                if child >= 0 and fits[tokens[child]]:
                    open_nodes.append((child, depth + 1, log_p + float(log_probabilities[tokens[child]])))
        _, _, node, root = max(found, key=lambda entry: entry[:2])
        end.append(node)
        roots.append(root)
    return ended_at(draft, torch.tensor(end, device=draft.ids.device), draft.ids.new_tensor(roots))


def typical(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """A mask [..., V] of the typical tokens, whose probability p is above min(epsilon, delta exp(-entropy)).

    The entropy is that of the distribution `p` [..., V] (Medusa paper, section 2.3.1). The most probable token always
    passes; the mask sets it explicitly, because equality or rounding could exclude it at delta 1."""
    p = p.double()
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    threshold = (delta * entropy.neg().exp()).clamp_max(epsilon)
    return (p > threshold).scatter(-1, p.argmax(-1, keepdim=True), True)


def among_best(scores: Tensor, k: int) -> Tensor:
    """A mask [V] of the k tokens with the highest scores [V]: top-k selection (Stern et al. 2018, section 5.1).

    Tokens that a logits processor set to -inf are excluded."""
    best = scores.topk(min(k, len(scores))).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, best, True) & (scores > -torch.inf)


def near_best(scores: Tensor, distance: int) -> Tensor:
    """A mask [V] of the token ids within `distance` of the id with the best score (Stern et al. 2018, section 5.2).

    Neighbouring ids must mean similar values, as for pixels or audio samples. Tokens with score -inf are excluded."""
    ids = torch.arange(len(scores), device=scores.device)
    return ((ids - scores.argmax()).abs() <= distance) & (scores > -torch.inf)


class TreeWalk:
    """The walk of B rows down their draft trees, one depth at a time; each row's walk ends at its own depth."""

    def __init__(self, draft: Draft, depth_limit: Tensor | None) -> None:
        self.draft, self.depth_limit = draft, depth_limit
        self.end = draft.ids.new_zeros(len(draft.ids))  # [B] the node that each row has reached
        self.root = draft.ids.new_zeros(len(draft.ids))  # [B] the token decided after that node
        self.rows = torch.arange(len(draft.ids), device=draft.ids.device)  # [R]
        self.depth = 0

    @property
    def nodes(self) -> Tensor:
        """The draft node [R] that each of the R unfinished rows has reached in its walk."""
        return self.end[self.rows]

    def children(self) -> Tensor:
        """Children [R, C] of the node that each unfinished row has reached; -1: none, or beyond `depth_limit`."""
        topology, limit = self.draft.topology, self.depth_limit
        children = topology.at(topology.children, self.rows, self.nodes)
        return children if limit is None else torch.where(limit[self.rows, None] > self.depth, children, -1)

    def child_that_holds(self, token: Tensor) -> Tensor:
        """Find, for each unfinished row, the child of its current node that holds its `token` [R]; -1 if none does."""
        children = self.children()
        held = self.draft.ids[self.rows[:, None], children.clamp_min(0)]
        match = (held == token[:, None].to(held.device)) & (children >= 0)
        return torch.where(match, children, -1).amax(-1) if children.shape[1] else torch.full_like(self.rows, -1)

    def go_on(self, child: Tensor, token: Tensor) -> None:
        """Move unfinished rows to their `child` [R]; -1 ends a walk. `token`: the next root of each row that ends."""
        ends = child < 0
        self.root[self.rows[ends]] = token.to(self.root.device)
        self.rows = self.rows[~ends]
        self.end[self.rows] = child[~ends]
        self.depth += 1


def ended_at(draft: Draft, end: Tensor, next_root: Tensor) -> Acceptance:
    """Make the `Acceptance` of B paths from the root to the nodes `end` [B], with the tokens `next_root` after them."""
    topology, rows = draft.topology, torch.arange(len(end), device=end.device)
    length = topology.at(topology.depth, rows, end) + 1
    return Acceptance(topology.at(topology.paths, rows, end), length, next_root, end)
