"""Trees that are grown level by level: one pass per level predicts the children of all nodes that get children.

A static tree says which nodes get children. In a dynamic tree they are the most probable nodes of a level, equally many
in every step, so that shapes are fixed (unless `DynamicTree.min_probability` stops drafting). In a drawn tree the
children of each node are drawn from the node's own distribution.

Shapes: B rows, W nodes of a level that get children, R guesses considered, S size of a part of a state, V vocabulary,
N nodes, M nodes of a level.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft, Frontier, Proposal
from decode.drafters.layouts import STEEPNESS, TOP, DynamicTree, bounded, require_draftable
from decode.ops.draws import Draws, draw_distinct
from decode.ops.fast_topk import top_k
from decode.target import Target
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import SequentialHeads, State
from medusa.tree import Layout, Tree
from medusa.vocabulary import lm_head_for, over_all, token_ids


class Level(NamedTuple):
    """The nodes of one depth of a static tree, and their parents among the W nodes with children above."""

    parent: Tensor
    """[M] which of the W nodes is the parent."""
    rank: Tensor
    """[M] which of the parent's guesses the node holds."""
    place: Tensor
    """[M] the node's place among its siblings."""
    expanded: Tensor
    """[W of the next level] the nodes of this level that have children."""


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
    """How many nodes of a level get children in a dynamic tree of `nodes` nodes, root included.

    Measured: for 8 nodes two are as good as all, for 16 three are; for 64, eight cost a hundredth of tau.
    """
    return max(2, round(nodes**0.5))


def width_of(tree: DynamicTree) -> int:
    """`min_width`, or more if the levels of a shallow tree would hold too few nodes to choose from."""
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
        """Predict the children of nodes at `depth`, from the states [B, W, S] that their parents left and their tokens
        [B, W]; returns logits of the children [B, W, V], and the nodes' new states."""

    def token_ids(self, guesses: Tensor) -> Tensor:
        """The tokens [...] of indices [...] into the logits."""
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
        zero, log_p_above = torch.zeros_like(root), torch.zeros(root.shape, device=root.device)
        # Per level [B, M]: ids, parents among all nodes, log probabilities, depths.
        levels, num_nodes = [(root, zero, log_p_above, zero)], 1
        state, tokens, above = self.begin(frontier), root, zero
        for depth in range(tree.max_depth):
            logits, state = self.step(depth, state, tokens, frontier.context_kv)
            best = top_k(tree.log_confidences(logits, depth), min(TOP, tree.num_nodes - 1))  # [B, W, R]
            log_p = (bounded(best.values.to(root.device)) - STEEPNESS + log_p_above[:, :, None]).flatten(1)
            log_p, indices = log_p.topk(min(tree.num_nodes - 1, log_p.shape[1]), dim=-1)  # [B, M], the best first
            count = min(log_p.shape[1], tree.num_worthwhile(log_p))
            if not count:  # deeper nodes are even less probable
                break
            log_p, indices = log_p[:, :count], indices[:, :count]
            parent = indices // best.values.shape[-1]  # [B, M] which of the W nodes
            found = self.token_ids(best.indices).to(root.device).flatten(1).gather(1, indices)
            levels.append((found, above.gather(1, parent), log_p, torch.full_like(found, depth + 1)))
            width = min(self.width, count)
            tokens, log_p_above = found[:, :width], log_p[:, :width]
            above = torch.arange(num_nodes, num_nodes + width, device=root.device).expand(len(root), -1)
            num_nodes += count
            index = parent[:, :width, None].to(state[0].device)
            state = tuple(part.gather(1, index.expand(-1, -1, part.shape[-1])) for part in state)
        return _most_probable(tree, *(torch.cat(parts, dim=1) for parts in zip(*levels, strict=True)))

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """Draw a tree `copies` times from each row; several copies are possible for a single row only.

        Copies that have drawn the same path share a distribution, so that many copies take one pass per different path.
        """
        root, shared = frontier.root.repeat_interleave(copies), copies > 1
        rows = len(frontier.rows)
        assert not shared or rows == 1, "copies of one row only"
        everyone = torch.arange(len(root), device=root.device)
        # P different paths, sorted by row, with states [rows, P / rows, S] and last tokens [rows, P / rows]; `path`
        # [B, W] is the path of each node with children.
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


def _most_probable(tree: DynamicTree, ids: Tensor, parent: Tensor, log_probs: Tensor, depth: Tensor) -> Draft:
    """The root and the most probable of all grown nodes, each given as [B, nodes]."""
    chosen = tree.most_probable(log_probs)
    nodes = chosen.shape[1]
    place = torch.zeros_like(ids).scatter_(1, chosen, torch.arange(nodes, device=ids.device).expand_as(chosen))
    parent = place.gather(1, parent.gather(1, chosen))
    topology = Topology.from_parents(parent, depth.gather(1, chosen), tree.max_depth, nodes - 1)
    return Draft(ids.gather(1, chosen), topology)


class PathDrafter(LevelwiseDrafter):
    """Drafts with heads that follow the path (`medusa.heads.sequential`), one head per level."""

    def __init__(self, heads: SequentialHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Raise a `RequestError` if the heads do not fit the backbone, or cannot fill or draw the tree."""
        require_draftable(heads.config, backbone, tree, drawn=target is not None)
        super().__init__(tree.to(backbone.device), target)
        self.heads, self.backbone, self.dtype = heads, backbone, heads.dtype
        self.lm_head = lm_head_for(heads, backbone)

    def begin(self, frontier: Frontier) -> State:
        return self.heads.begin(frontier.hidden.to(self.heads.device, self.dtype)[:, None])

    def step(self, depth: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        embedded = self.backbone.embed(tokens).to(device=state[0].device, dtype=self.dtype)
        features, state = self.heads.step(depth, state, embedded, context_kv)
        return self.heads.logits_of(depth, features, self.lm_head), state

    def token_ids(self, guesses: Tensor) -> Tensor:
        return token_ids(self.heads, guesses)

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        return over_all(self.heads, logits, self.backbone.vocab_size)
