"""Trees that are grown level by level: each level costs one pass over the nodes that get children.

A static tree says which nodes these are. In a dynamic tree they are the most probable nodes of a level, as many in
every step, so that shapes are fixed (unless drafting stops early, `DynamicTree.min_probability`). A drawn tree draws
the children of each node from the node's own distribution.

Shapes: B rows, W nodes of a level that get children, R guesses considered, S size of a part of a state, V vocabulary,
N nodes, M nodes of a level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft, Frontier, Proposal
from decode.drafters.dynamic_tree import STEEPNESS, TOP, DynamicTree, bounded
from decode.ops.draws import Draws, draw_distinct
from decode.ops.fast_topk import TopK, top_k
from decode.target import Target
from decode.topology import Topology
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import State
from medusa.tree import Layout, Tree


class Level(NamedTuple):
    """How the nodes of one depth of a static tree hang under the nodes with children of the depth above."""

    parent: Tensor
    """[M] which of the W nodes with children is the parent."""
    rank: Tensor
    """[M] which of the parent's guesses the node holds."""
    place: Tensor
    """[M] the node's place among its siblings."""
    expanded: Tensor
    """[W of the next level] which of these nodes have children."""


def levels_of(tree: Tree) -> list[Level]:
    """The levels of a static tree, from depth 1 on."""
    levels, has_children = [], torch.zeros_like(tree.parent, dtype=torch.bool)
    has_children[tree.parent[1:]] = True
    position = torch.zeros_like(tree.parent)  # of a node with children among those of its depth
    for depth in range(1, tree.max_depth + 1):
        nodes = (tree.depth == depth).nonzero()[:, 0]
        expanded = has_children[nodes].nonzero()[:, 0]
        levels.append(Level(position[tree.parent[nodes]], tree.rank[nodes], tree.order[nodes], expanded))
        position[nodes[expanded]] = torch.arange(len(expanded), device=nodes.device)
    return levels


def min_width(nodes: int) -> int:
    """Nodes of a level that get children, in a dynamic tree of `nodes` nodes (root included).

    By measurement: with 8 nodes two are as good as all, with 16 three, with 64 eight cost a hundredth of tau.
    """
    return max(2, round(nodes**0.5))


def width_of(tree: DynamicTree) -> int:
    """`min_width`, or more where the levels of a shallow tree would hold too few nodes to choose from."""
    width, wanted = min_width(tree.num_nodes), tree.num_nodes - 1
    for wider in range(width, wanted):
        found = level = min(wanted, TOP)
        for _ in range(1, tree.max_depth):
            level = min(wanted, min(wider, level) * min(wanted, TOP))
            found += level
        if found >= wanted:
            return wider
    return max(width, wanted)


class LevelwiseDrafter(ABC):
    """Grows a static tree or a dynamic one; with a `target` it draws a static one."""

    def __init__(self, tree: Layout, target: Target | None = None) -> None:
        self.tree, self.target = tree, target
        if isinstance(tree, DynamicTree):
            self.width = width_of(tree)
            return
        self.levels, self.topology = levels_of(tree.candidates), Topology.of(tree.candidates)
        self.top = [int(level.rank.max()) + 1 for level in self.levels]  # guesses considered, by level

    @abstractmethod
    def begin(self, frontier: Frontier) -> State:
        """The state at each root [B, 1, S]."""

    @abstractmethod
    def step(self, depth: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """Predict the children of nodes at `depth`.

        Args:
            state: parts [B, W, S] of the nodes' states, as their parents left them.
            tokens: [B, W] the nodes' tokens.

        Returns:
            Logits of the children [B, W, V], and the states that the children start from.
        """

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The tokens [...] that indices [...] into the logits stand for."""
        return guesses

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary [..., V]; -inf for tokens that the drafter does not predict."""
        return logits

    def propose(self, frontier: Frontier) -> Draft:
        """Grow the tree of one step."""
        if self.tree.max_depth == 0:
            return Draft(frontier.root[:, None], self.topology)
        if isinstance(self.tree, DynamicTree):
            return self._dynamic(frontier, self.tree)
        if self.target is not None:
            return self.draw(frontier, self.target, self.target.draws.of(frontier.rows))
        ids, state, tokens = [frontier.root[:, None]], self.begin(frontier), frontier.root[:, None]
        for depth, level in enumerate(self.levels):
            logits, state = self.step(depth, state, tokens, frontier.context_kv)
            count = self.top[depth]
            guesses = self.token_ids(top_k(logits, count).indices).flatten(1).to(tokens.device)  # [B, W * R]
            found = guesses[:, level.parent * count + level.rank]
            ids.append(found)
            above = level.parent[level.expanded].to(state[0].device)
            tokens, state = found[:, level.expanded], tuple(part[:, above] for part in state)
        return Draft(torch.cat(ids, dim=1), self.topology)

    def _dynamic(self, frontier: Frontier, tree: DynamicTree) -> Draft:
        """Grow under the most probable nodes of each level, and keep the `num_nodes` most probable nodes of all."""
        root = frontier.root[:, None]
        grown = _Grown.at(root)
        state, tokens, above = self.begin(frontier), root, torch.zeros_like(root)
        log_p_above = torch.zeros(root.shape, device=root.device)
        for depth in range(tree.max_depth):
            logits, state = self.step(depth, state, tokens, frontier.context_kv)
            best = top_k(tree.log_confidences(logits, depth), min(TOP, tree.num_nodes - 1))  # [B, W, R]
            log_p = bounded(best.values.to(root.device)) - STEEPNESS + log_p_above[:, :, None]
            # [B, M], the best first
            keep = TopK(*log_p.flatten(1).topk(min(tree.num_nodes - 1, log_p[0].numel()), dim=-1))
            count = min(keep.values.shape[1], tree.num_worthwhile(keep.values))
            if not count:  # no level below has more probable nodes
                break
            keep = TopK(keep.values[:, :count], keep.indices[:, :count])
            parent = keep.indices // best.values.shape[-1]  # [B, M] which of the W nodes
            found = self.token_ids(best.indices).to(root.device).flatten(1).gather(1, keep.indices)
            first = grown.num_nodes
            grown.add(found, above.gather(1, parent), keep.values, depth + 1)
            width = min(self.width, count)
            tokens, log_p_above = found[:, :width], keep.values[:, :width]
            above = torch.arange(first, first + width, device=root.device).expand(len(root), -1)
            index = parent[:, :width, None].to(state[0].device)
            state = tuple(part.gather(1, index.expand(-1, -1, part.shape[-1])) for part in state)
        return grown.most_probable(tree)

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """Draw a tree `copies` times from each row; the children of a node come from the node's own distribution.

        Copies that have drawn the same path share a distribution, so a million of them take one pass for each different
        path. More than one copy is possible for a frontier of one row only.
        """
        root, shared = frontier.root.repeat_interleave(copies), copies > 1
        rows = len(frontier.rows)
        assert not shared or rows == 1, "copies are of one row"
        everyone = torch.arange(len(root), device=root.device)
        # P different paths, those of a row together: states [rows, P / rows, S] and the last token of each path;
        # `path` [B, W] says which path each node with children is on.
        state, tokens = self.begin(frontier), frontier.root[:, None]
        path = torch.arange(rows, device=root.device).repeat_interleave(copies)[:, None]
        ids, distributions, of_children, known = [root[:, None]], [], [path], 0
        for depth, level in enumerate(self.levels):
            logits, state = self.step(depth, state, tokens, frontier.context_kv)
            q = target.draft_probabilities(frontier.rows, self.over_vocabulary(logits))
            q = q.flatten(0, 1).to(root.device)  # [P, V]
            distributions.append(q)
            known += len(q)
            width, most = path.shape[1], int(level.place.max()) + 1
            u = draws.uniforms(everyone, width * most).view(-1, most)
            drawn = draw_distinct(q, path.flatten(), u).view(len(root), width * most)
            found = drawn[:, level.parent * most + level.place]
            ids.append(found)
            before, last = path[:, level.parent[level.expanded]], found[:, level.expanded]
            keys = before * q.shape[-1] + last
            if shared:
                paths, path = keys.unique(return_inverse=True)
            else:
                paths, path = keys.flatten(), torch.arange(keys.numel(), device=root.device).view(keys.shape)
            before, tokens = (paths // q.shape[-1]).to(state[0].device), (paths % q.shape[-1]).view(rows, -1)
            state = tuple(part.flatten(0, 1)[before].unflatten(0, (rows, -1)) for part in state)
            own = torch.zeros_like(found)
            own[:, level.expanded] = known + path
            of_children.append(own)
        proposal = Proposal(torch.cat(distributions), torch.cat(of_children, dim=1))
        return Draft(torch.cat(ids, dim=1), self.topology, proposal)


class _Grown:
    """The nodes of a dynamic tree grown so far, in each row; node 0 is the root."""

    def __init__(self, ids: list[Tensor], parents: list[Tensor], log_probs: list[Tensor], depths: list[Tensor]) -> None:
        self.ids, self.parents, self.log_probs, self.depths = ids, parents, log_probs, depths
        self.num_nodes = 1

    @classmethod
    def at(cls, root: Tensor) -> _Grown:
        """The roots [B, 1] alone."""
        zero = torch.zeros_like(root)
        return cls([root], [zero], [torch.zeros(root.shape, device=root.device)], [zero])

    def add(self, ids: Tensor, parents: Tensor, log_probs: Tensor, depth: int) -> None:
        """Add a level of nodes, all [B, M]."""
        self.ids.append(ids)
        self.parents.append(parents)
        self.log_probs.append(log_probs)
        self.depths.append(torch.full_like(ids, depth))
        self.num_nodes += ids.shape[1]

    def most_probable(self, tree: DynamicTree) -> Draft:
        """The root and the most probable nodes, as many as the tree has."""
        log_probs = torch.cat(self.log_probs, dim=1)[:, 1:]
        root = self.ids[0]
        nodes = 1 + min(tree.num_nodes - 1, tree.num_worthwhile(log_probs))
        chosen = log_probs.topk(nodes - 1, dim=-1, sorted=False).indices + 1
        chosen = torch.cat([torch.zeros_like(root), chosen.sort(dim=-1).values], dim=1)
        place = torch.zeros(len(root), self.num_nodes, dtype=torch.long, device=root.device)
        place.scatter_(1, chosen, torch.arange(nodes, device=root.device).expand_as(chosen))
        parent = place.gather(1, torch.cat(self.parents, dim=1).gather(1, chosen))
        depth = torch.cat(self.depths, dim=1).gather(1, chosen)
        topology = Topology.from_parents(parent, depth, tree.max_depth, nodes - 1)
        return Draft(torch.cat(self.ids, dim=1).gather(1, chosen), topology)
