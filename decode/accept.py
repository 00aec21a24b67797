"""Which drafted tokens stay: from a draft and the backbone's opinion to an accepted path and the next root.

Every rule walks from the root to deeper nodes and never looks at padding: a node is accepted when it and all nodes
above it are (docs/exactness.md has the proofs). The walks ask for the target only where they come by, all rows at one
depth at a time. Rows may share contexts, so that a million rows can walk over one forward of the backbone.

Shapes: B rows, R of them still walking, N nodes, M distributions that these R rows share, V vocabulary, D the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from decode.draft import Draft

Scores = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(rows [R], nodes [R]) -> the target's scores [M, V], whose softmax it is, and which of them each row takes [R]."""
Decide = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R], scores [M, V], index [R]) -> the token that the target decides on in each row [R]."""

Passes = Callable[[Tensor], Tensor]
"""The target's scores [V] after a text -> which tokens a lossy rule lets stay there [V]."""


class Draws(Protocol):
    """Random numbers, every row from a stream of its own or all from one."""

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        """rows [R], probabilities [M, V], which of them each row takes [R] -> one draw a row [R]."""
        ...

    def uniform(self, rows: Tensor) -> Tensor:
        """rows [R] -> numbers in [0, 1), float64 [R]."""
        ...

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        """rows [R] -> `count` numbers each [R, count]."""
        ...


class Acceptance(NamedTuple):
    """What a step decided."""

    path: Tensor
    """[B, D + 1] accepted nodes from the root on, padded with -1."""
    length: Tensor
    """[B] how many nodes that is, the root counted."""
    next_root: Tensor
    """[B] the token that the target decided on where the path ended."""
    end: Tensor
    """[B] the node where it did."""


def accept_greedy(draft: Draft, best: Tensor, room: Tensor | None = None) -> Acceptance:
    """Keep the nodes that hold what greedy decoding would have written (Stern et al. 2018, for trees).

    Args:
        best: [B, N] the target's most probable token after each node.
        room: [B] how deep a node may lie, where the context or cache ends; no limit by default.
    """
    topology = draft.topology
    match = draft.ids == best.gather(1, topology.parent.expand_as(draft.ids))
    accepted = (match[:, None, :] | topology.non_ancestors).all(-1)  # [B, N]: itself and everything above it matches
    if room is not None:
        accepted &= topology.depth <= room[:, None]
    end = torch.where(accepted, topology.depth, -1).argmax(-1)  # [B]
    return ended_at(draft, end, best.gather(1, end[:, None])[:, 0])


def accept_walk(draft: Draft, target: Scores, decide: Decide, room: Tensor | None = None) -> Acceptance:
    """Let the target write, one token at a time, and follow it down the tree as far as the draft foresaw it.

    At each node reached the target's token is decided once; a child that holds it is accepted, and otherwise it is the
    next root: decided tokens are never thrown away, so the text has exactly the target's distribution whatever the
    draft. Being the longest prefix of the target's text inside the tree, the accepted path cannot be beaten by any
    lossless rule on a tree that does not depend on the draws. With a `decide` that takes the most probable token it is
    greedy decoding, and processors see every node with its own prefix.
    """
    walk = _Walk(draft, room)
    while len(walk.rows):
        scores, index = target(walk.rows, walk.nodes)
        token = decide(walk.rows, scores, index)
        child = walk.child_that_holds(token)
        walk.go_on(child, token[child < 0])
    return walk.ended()


def accept_sampled(draft: Draft, target: Scores, draws: Draws, room: Tensor | None = None) -> Acceptance:
    """Rejection sampling of a tree that was itself sampled (Leviathan et al. 2023; siblings: SpecInfer, RRSw).

    At each node reached, its children are tried in the order in which they were drawn. A child x is accepted with
    probability min(1, p(x) / q(x)). When it is rejected, p becomes its residual max(0, p - q), normalised, and q loses
    x, because the next sibling was drawn without it. When no child is left, the next root is drawn from what p has
    become. The text then has exactly the target's distribution.

    Only for drafts with a `proposal`: for chosen tokens p / q is wrong, whatever q is taken.
    """
    assert draft.proposal is not None, "only a draft that was drawn can be rejected by p / q"
    walk = _Walk(draft, room)
    while len(walk.rows):
        scores, index = target(walk.rows, walk.nodes)
        child, left = _first_accepted(draft, walk, Residuals.at_first(draft, walk, scores, index), draws)
        ends = child < 0
        walk.go_on(child, draws.tokens(walk.rows[ends], left.p, left.p_of[ends]))
    return walk.ended()


def _first_accepted(draft: Draft, walk: _Walk, beliefs: Residuals, draws: Draws) -> tuple[Tensor, Residuals]:
    """The child that each walking row accepts, or -1, [R]; and what p and q have become by the rejections."""
    accepted = torch.full_like(walk.rows, -1)
    children = walk.children()
    for place, child in enumerate(children.T, 1):  # [R]: each row's first child, then each row's second, ...
        trying = ((child >= 0) & (accepted < 0)).nonzero()[:, 0]
        if not len(trying):
            continue
        token = draft.ids[walk.rows[trying], child[trying]]
        p, q = beliefs.of_token(trying, token)
        passes = passes_ratio(draws.uniform(walk.rows[trying]), p, q)
        # q = 0: the draft ran out of words and repeats one (`draw_distinct`), so there is nothing to accept or reject.
        drawn = q > 0
        accepted[trying[passes & drawn]] = child[trying[passes & drawn]]
        fails = ~passes & drawn
        beliefs = beliefs.after_rejection(trying[fails], token[fails], was_last=place == children.shape[1])
    return accepted, beliefs


class Residuals(NamedTuple):
    """What the next token is still to be drawn from, p, and what the next sibling was drawn from, q, in each row.

    Rows with the same past share distributions. A residual does not depend on the token that was rejected, only q does:
    so there are far fewer of the one than of the other.
    """

    p: Tensor
    """[Mp, V]."""
    q: Tensor
    """[Mq, V]."""
    p_of: Tensor
    """[R] which p each row has."""
    q_of: Tensor
    """[R] which q each row has."""
    shared: bool
    """Whether rows with the same past are to be found; with few rows one for each is less work."""

    @classmethod
    def at_first(cls, draft: Draft, walk: _Walk, scores: Tensor, index: Tensor) -> Residuals:
        assert draft.proposal is not None
        q, of_children = draft.proposal
        q_of = of_children[walk.rows, walk.nodes]
        return cls(scores.softmax(-1), q.to(scores.device), index, q_of, len(scores) < len(index))

    def of_token(self, rows: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """rows [X] of the R and a token each -> its p and q [X], float64."""
        return self.p[self.p_of[rows], token].double(), self.q[self.q_of[rows], token].double()

    def after_rejection(self, rows: Tensor, token: Tensor, was_last: bool) -> Residuals:
        """rows [X] of the R whose `token` [X] was rejected: they get the residual, all others keep what they have.

        `was_last`: no sibling follows anywhere, so nobody will ask for q again.
        """
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
    """u < p / q for numbers u in [0, 1): true with probability min(1, p / q)."""
    return u * q < p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """p, q [M, V] -> max(0, p - q), normalised [M, V]: what the next token follows once a draw from q was rejected."""
    rest = (p - q).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    # No mass left is a rejection by rounding: p = q there, and a draw from either is right.
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """q [M, V] and tokens [M] -> q without its token, normalised [M, V]; zeros where nothing is left."""
    rest = q.scatter(1, token[:, None], 0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def _distinct(key: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
    """keys [R] -> the distinct ones [M] and where each stands [R]; unless `shared`, each row is taken for its own."""
    if shared:
        return key.unique(return_inverse=True)
    return key, torch.arange(len(key), device=key.device)


def accept_typical(
    draft: Draft, target: Scores, epsilon: float, delta: float, room: Tensor | None = None
) -> Acceptance:
    """Typical acceptance, the paper's deterministic form (section 2.3.1). Lossy: neither greedy nor a sample.

    A token x is accepted after c where p(x | c) > min(epsilon, delta exp(-H(p(. | c)))). As exp(-H) never exceeds max
    p, the most probable token always passes.
    """
    return accept_longest(draft, target, lambda scores: typical(scores.softmax(-1), epsilon, delta), room)


def accept_longest(draft: Draft, target: Scores, passes: Passes, room: Tensor | None = None) -> Acceptance:
    """Keep the longest path of tokens that pass, among equally long ones the most probable; lossy.

    The next root is the target's most probable token behind it. Where that token always passes, no step is shorter
    than a greedy one.
    """
    topology, end, roots = draft.topology, [], []
    tables = topology.children.tolist()
    limits = [topology.max_depth] * len(draft.ids) if room is None else room.tolist()
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
    """probabilities [..., V] -> which tokens are typical [..., V]: p > min(epsilon, delta exp(-H(p))), paper 2.3.1.

    The most probable one always is, by the inequality above; rounding must not overrule it where delta is 1.
    """
    p = p.double()
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    threshold = (delta * entropy.neg().exp()).clamp_max(epsilon)
    return (p > threshold).scatter(-1, p.argmax(-1, keepdim=True), True)


def among_best(scores: Tensor, k: int) -> Tensor:
    """scores [V] -> which tokens are among the k best [V]: top-k selection (Stern et al. 2018, section 5.1).

    Of what processors forbid (-inf) nothing is."""
    best = scores.topk(min(k, len(scores))).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, best, True) & (scores > -torch.inf)


def near_best(scores: Tensor, distance: int) -> Tensor:
    """scores [V] -> which ids lie at most `distance` from the best one's [V] (Stern et al. 2018, section 5.2).

    For vocabularies whose order means something, such as pixels or samples of sound. What is forbidden is not near."""
    ids = torch.arange(len(scores), device=scores.device)
    return ((ids - scores.argmax()).abs() <= distance) & (scores > -torch.inf)


class _Walk:
    """B rows on their way down one tree; those still walking all stand at one depth."""

    def __init__(self, draft: Draft, room: Tensor | None) -> None:
        self.draft, self.room = draft, room
        self.end = draft.ids.new_zeros(len(draft.ids))  # [B] the node where each row stands
        self.root = draft.ids.new_zeros(len(draft.ids))  # [B] the token that was decided on behind it
        self.rows = torch.arange(len(draft.ids), device=draft.ids.device)  # [R]
        self.depth = 0

    @property
    def nodes(self) -> Tensor:
        """[R] where the walking rows stand."""
        return self.end[self.rows]

    def children(self) -> Tensor:
        """[R, C] the children of the walking rows' nodes that they may step to, in order, padded with -1."""
        topology = self.draft.topology
        children = topology.at(topology.children, self.rows, self.nodes)
        if self.room is None:
            return children
        return torch.where(self.room[self.rows, None] > self.depth, children, -1)

    def child_that_holds(self, token: Tensor) -> Tensor:
        """token [R] -> the child that holds it, or -1 [R]."""
        children = self.children()
        held = self.draft.ids[self.rows[:, None], children.clamp_min(0)]
        match = (held == token[:, None].to(held.device)) & (children >= 0)
        return torch.where(match, children, -1).amax(-1) if children.shape[1] else torch.full_like(self.rows, -1)

    def go_on(self, child: Tensor, token: Tensor) -> None:
        """Step to `child` [R]; rows without one (-1) end here, and their tokens [number of them] are the next roots."""
        ends = child < 0
        self.root[self.rows[ends]] = token.to(self.root.device)
        self.rows = self.rows[~ends]
        self.end[self.rows] = child[~ends]
        self.depth += 1

    def ended(self) -> Acceptance:
        return ended_at(self.draft, self.end, self.root)


def ended_at(draft: Draft, end: Tensor, next_root: Tensor) -> Acceptance:
    """end [B] and next_root [B] -> all that a step decided."""
    topology, rows = draft.topology, torch.arange(len(end), device=end.device)
    length = topology.at(topology.depth, rows, end) + 1
    return Acceptance(topology.at(topology.paths, rows, end), length, next_root, end)
