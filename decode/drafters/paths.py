"""Heads that follow the path (`medusa.heads.sequential`) as a drafter: the tree is grown level by level, all its
nodes at once.

Every level costs one pass of a head over the nodes that have children. With a static tree these are given; with a
dynamic one the most promising of a level are taken, as many in every step, so that shapes stay fixed, unless drafting
is to stop where heads believe in nothing any more (`DynamicTree.min_confidence`).

Shapes: B rows, W nodes of a level that are expanded, R guesses looked at, S size of a part of a state, V vocabulary,
N nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode.accept import Draws
from decode.draft import Draft, Frontier, Proposal
from decode.drafters.dynamic_tree import STEEPNESS, TOP, DynamicTree, bounded
from decode.drafters.heads import require_draftable
from decode.ops.fast_topk import Greatest, top_k
from decode.sampling import Target, draw_distinct
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import SequentialHeads, State
from medusa.tree import Layout, Tree
from medusa.vocabulary import lm_head_for, over_all, token_ids


def least_width(nodes: int) -> int:
    """Nodes of a level that get children, in a dynamic tree of so many nodes (root included).

    By measurement: with 8 nodes two are as good as all, with 16 three, with 64 eight lose a hundredth of tau.
    """
    return max(2, round(nodes**0.5))


class Level(NamedTuple):
    """How the nodes of one depth of a static tree hang under the expanded nodes of the depth above."""

    parent: Tensor
    """[number of nodes] which of the W expanded nodes above."""
    rank: Tensor
    """[number of nodes] which of its guesses."""
    place: Tensor
    """[number of nodes] the node's place among its siblings."""
    expanded: Tensor
    """[W below] which of these nodes have children."""


def levels_of(tree: Tree) -> list[Level]:
    """One for each depth from 1 on."""
    levels, has_children = [], torch.zeros_like(tree.parent, dtype=torch.bool)
    has_children[tree.parent[1:]] = True
    position = torch.zeros_like(tree.parent)  # of an expanded node among those of its depth
    for depth in range(1, tree.max_depth + 1):
        nodes = (tree.depth == depth).nonzero()[:, 0]
        expanded = has_children[nodes].nonzero()[:, 0]
        levels.append(Level(position[tree.parent[nodes]], tree.rank[nodes], tree.order[nodes], expanded))
        position[nodes[expanded]] = torch.arange(len(expanded), device=nodes.device)
    return levels


def width_of(tree: DynamicTree) -> int:
    """The width, more than `least_width` where a shallow tree's levels would not hold enough nodes to choose from."""
    least, wanted = least_width(tree.num_nodes), tree.num_nodes - 1
    for width in range(least, wanted):
        found = level = min(wanted, TOP)
        for _ in range(1, tree.max_depth):
            level = min(wanted, min(width, level) * min(wanted, TOP))
            found += level
        if found >= wanted:
            return width
    return max(least, wanted)


class PathDrafter:
    """Grows a static tree, a dynamic one, or with a `target` draws one."""

    def __init__(self, heads: SequentialHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Raises:
        RequestError: heads of another size than the backbone, or a tree that they cannot fill or draw."""
        require_draftable(heads.config, backbone, tree, drawn=target is not None)
        self.heads, self.backbone, self.target = heads, backbone, target
        self.lm_head = lm_head_for(heads, backbone)
        self.dtype = heads.dtype
        self.lay_out(tree)

    def lay_out(self, tree: Layout) -> None:
        """Prepare the levels of a static tree, or the width of a dynamic one."""
        self.tree = tree.to(self.backbone.device)
        if isinstance(self.tree, DynamicTree):
            self.width = width_of(self.tree)
            return
        static = self.tree.candidates
        self.levels, self.topology = levels_of(static), Topology.of(static)
        self.top = [int(level.rank.max()) + 1 for level in self.levels]  # guesses that are looked at

    def propose(self, frontier: Frontier) -> Draft:
        if self.tree.max_depth == 0:
            return Draft(frontier.root[:, None], self.topology)
        if isinstance(self.tree, DynamicTree):
            return self._dynamic(frontier, self.tree)
        if self.target is not None:
            return self.draw(frontier, self.target, self.target.draws.of(frontier.rows))
        ids, state, tokens = [frontier.root[:, None]], self._begin(frontier), frontier.root[:, None]
        for head, level in enumerate(self.levels):
            logits, state = self._step(head, state, tokens, frontier.context_kv)
            count = self.top[head]
            guesses = token_ids(self.heads, top_k(logits, count).indices).flatten(1).to(tokens.device)  # [B, W * R]
            found = guesses[:, level.parent * count + level.rank]
            ids.append(found)
            under = level.parent[level.expanded].to(state[0].device)
            tokens, state = found[:, level.expanded], tuple(part[:, under] for part in state)
        return Draft(torch.cat(ids, dim=1), self.topology)

    def _begin(self, frontier: Frontier) -> State:
        """[B, 1, S]: the state at each root."""
        return self.heads.begin(frontier.hidden.to(self.heads.device, self.heads.dtype)[:, None])

    def _step(self, head: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """States [B, W, S] and tokens [B, W] of nodes -> logits [B, W, V] of what follows, and the states behind."""
        embedded = self.backbone.embed(tokens).to(device=state[0].device, dtype=self.dtype)
        features, state = self.heads.step(head, state, embedded, context_kv)
        return self.heads.logits_of(head, features, self.lm_head), state

    def _dynamic(self, frontier: Frontier, tree: DynamicTree) -> Draft:
        """Of all nodes under the most promising ones of each level, the `num_nodes` in which the heads believe most."""
        root = frontier.root[:, None]
        state, tokens, above = self._begin(frontier), root, torch.zeros_like(root)
        worth_above = torch.zeros(root.shape, device=root.device)
        ids, parents, worths, depths, count = [root], [above], [worth_above], [above], 1
        for head in range(tree.max_depth):
            logits, state = self._step(head, state, tokens, frontier.context_kv)
            best = top_k(tree.log_confidences(logits, head), min(TOP, tree.num_nodes - 1))  # [B, W, R]
            worth = bounded(best.values.to(root.device)) - STEEPNESS + worth_above[:, :, None]
            # [B, M], the best first
            keep = Greatest(*worth.flatten(1).topk(min(tree.num_nodes - 1, worth[0].numel()), dim=-1))
            worthwhile = min(keep.values.shape[1], tree.reached(keep.values))
            if not worthwhile:  # a child is never worth more than its parent: no level below is, either
                break
            keep = Greatest(keep.values[:, :worthwhile], keep.indices[:, :worthwhile])
            under = keep.indices // best.values.shape[-1]  # [B, M] which of the W expanded nodes
            found = token_ids(self.heads, best.indices).to(root.device).flatten(1).gather(1, keep.indices)
            ids.append(found)
            parents.append(above.gather(1, under))
            worths.append(keep.values)
            depths.append(torch.full_like(found, head + 1))
            width = min(self.width, found.shape[1])
            tokens, worth_above = found[:, :width], keep.values[:, :width]
            above = torch.arange(count, count + width, device=root.device).expand(len(root), -1)
            index = under[:, :width, None].to(state[0].device)
            state = tuple(part.gather(1, index.expand(-1, -1, part.shape[-1])) for part in state)
            count += found.shape[1]
        worth = torch.cat(worths, dim=1)[:, 1:]
        nodes = 1 + min(tree.num_nodes - 1, tree.reached(worth))
        chosen = worth.topk(nodes - 1, dim=-1, sorted=False).indices + 1
        chosen = torch.cat([torch.zeros_like(root), chosen.sort(dim=-1).values], dim=1)
        where = torch.zeros(len(root), count, dtype=torch.long, device=root.device)
        where.scatter_(1, chosen, torch.arange(nodes, device=root.device).expand_as(chosen))
        parent = where.gather(1, torch.cat(parents, dim=1).gather(1, chosen))
        depth = torch.cat(depths, dim=1).gather(1, chosen)
        topology = Topology.from_parents(parent, depth, tree.max_depth, nodes - 1)
        return Draft(torch.cat(ids, dim=1).gather(1, chosen), topology)

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """A draft whose nodes' children are drawn from their own distributions, `copies` times from each row.

        Copies share a distribution wherever they have drawn the same path, so that a million of them take no more heads
        than there are different paths; that is for a frontier of one row.
        """
        root, shared = frontier.root.repeat_interleave(copies), copies > 1
        rows = len(frontier.rows)
        assert not shared or rows == 1, "copies are of one row"
        everyone = torch.arange(len(root), device=root.device)
        # P different pasts, those of a row together: states [rows, P / rows, S] and token of each, and which one every
        # expanded node has [B, W].
        state, tokens = self._begin(frontier), frontier.root[:, None]
        past = torch.arange(rows, device=root.device).repeat_interleave(copies)[:, None]
        ids, distributions, of_children, known = [root[:, None]], [], [past], 0
        for head, level in enumerate(self.levels):
            logits, state = self._step(head, state, tokens, frontier.context_kv)
            logits = over_all(self.heads, logits, self.backbone.vocab_size)
            q = target.draft_probabilities(frontier.rows, logits).flatten(0, 1).to(root.device)  # [P, V]
            distributions.append(q)
            known += len(q)
            width, most = past.shape[1], int(level.place.max()) + 1
            u = draws.uniforms(everyone, width * most).view(-1, most)
            drawn = draw_distinct(q, past.flatten(), u).view(len(root), width * most)
            found = drawn[:, level.parent * most + level.place]
            ids.append(found)
            before, after = past[:, level.parent[level.expanded]], found[:, level.expanded]
            keys = before * q.shape[-1] + after
            if shared:
                paths, past = keys.unique(return_inverse=True)
            else:
                paths, past = keys.flatten(), torch.arange(keys.numel(), device=root.device).view(keys.shape)
            before, tokens = (paths // q.shape[-1]).to(state[0].device), (paths % q.shape[-1]).view(rows, -1)
            state = tuple(part.flatten(0, 1)[before].unflatten(0, (rows, -1)) for part in state)
            own = torch.zeros_like(found)
            own[:, level.expanded] = known + past
            of_children.append(own)
        return Draft(
            torch.cat(ids, dim=1), self.topology, Proposal(torch.cat(distributions), torch.cat(of_children, dim=1))
        )
