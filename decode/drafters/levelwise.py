"""Drafters that grow a tree level by level: one forward per level predicts the children of its expanded nodes.

A node is expanded if it gets children. A static tree fixes which nodes are expanded. A dynamic tree expands the most
probable nodes of each level, equally many in every step unless `min_probability` prunes the tree. In a sampled tree
(`--draft sample`), the children of a node are drawn from the drafter's distribution there.

Shapes: B rows, M nodes of a level, W expanded nodes of a level, R guesses considered per node, S size of a drafter's
state at a node, V vocabulary, N nodes of the tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft, Frontier, Proposal
from decode.drafters.layouts import STEEPNESS, TOP, DynamicTree, Layout, bounded, require_draftable
from decode.ops.draws import Draws, draw_distinct
from decode.ops.fast_topk import top_k
from decode.target import Target
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import SequentialHeads, State
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, over_all, token_ids


class Level(NamedTuple):
    """One level of a static tree: M nodes of equal depth, whose parents are the W expanded nodes of the level above."""

    parent: Tensor  # [M] index of each node's parent among the W expanded nodes of the level above
    rank: Tensor  # [M] rank of each node's token among the guesses for its parent's children, from 0
    place: Tensor  # [M] index of each node among its siblings
    expanded: Tensor  # [W of the next level] indices of the expanded nodes among the M nodes of this level


def levels_of(tree: Tree) -> list[Level]:
    """Split a static tree into its levels: the nodes of depth 1, of depth 2, and so on."""
    levels, has_children = [], torch.zeros_like(tree.parent, dtype=torch.bool)
    has_children[tree.parent[1:]] = True
    position = torch.zeros_like(tree.parent)  # index of an expanded node among those of its depth
    for depth in range(1, tree.max_depth + 1):
        nodes = (tree.depth == depth).nonzero()[:, 0]
        expanded = has_children[nodes].nonzero()[:, 0]
        levels.append(Level(position[tree.parent[nodes]], tree.rank[nodes], tree.order[nodes], expanded))
        position[nodes[expanded]] = torch.arange(len(expanded), device=nodes.device)
    return levels


def width_of(tree: DynamicTree) -> int:
    """Return how many nodes of each level get children: the square root of `num_nodes`, or more for a shallow tree.

    Measured by tokens per step (docs/log.md): in a tree of 8 nodes, 2 expanded nodes per level are as good as more. In
    a tree of 16 nodes, 3 are. In a tree of 64 nodes, 8 give 2 % fewer tokens than 12."""
    width, wanted = max(2, round(tree.num_nodes**0.5)), tree.num_nodes - 1
    for wider in range(width, wanted):
        found = level = min(wanted, TOP)
        for _ in range(1, tree.max_depth):
            level = min(wanted, min(wider, level) * min(wanted, TOP))
            found += level
        if found >= wanted:
            return wider
    return max(width, wanted)


class LevelwiseDrafter(ABC):
    """Base class of level-by-level drafters. With a `target` (`--draft sample`), they sample a static tree's tokens."""

    def __init__(self, tree: Layout, target: Target | None = None) -> None:
        self.tree, self.target = tree, target  # the target holds the sampling options and random draws of the texts
        if isinstance(tree, DynamicTree):
            self.width = width_of(tree)
            return
        self.levels, self.topology = levels_of(tree.candidates), Topology.of(tree.candidates)
        self.top = [int(level.rank.max()) + 1 for level in self.levels]  # guesses considered, by level
        # By level: the expanded nodes of the level above, and the most children of one, for draws.
        self.drawn = [(int(level.parent.max()) + 1, int(level.place.max()) + 1) for level in self.levels]

    @abstractmethod
    def begin(self, frontier: Frontier) -> State:
        """Make the state from which `step` predicts the root's children: tensors [B, 1, S], any S, for B texts."""

    @abstractmethod
    def step(self, depth: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """Predict the children of W nodes at `depth` in each of B texts; returns logits [B, W, V] and the nodes' state.

        `tokens` [B, W] are the nodes' tokens. `state` [B, W, S]: for each node, the state from its parent's step."""

    def token_ids(self, guesses: Tensor) -> Tensor:
        """Convert indices in the drafter's vocabulary, which may be a reduced one, to token ids of the same shape."""
        return guesses

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        """Expand the drafter's logits to the backbone's V tokens, [..., V]; tokens that it never predicts get -inf."""
        return logits

    def propose(self, frontier: Frontier) -> Draft:
        """Draft a tree for each text in `frontier`: a static, a dynamic or a sampled tree."""
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
        """Draft a dynamic tree: expand the most probable nodes of each level, then keep the most probable nodes."""
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
            parent = indices // best.values.shape[-1]  # [B, M] index among the W nodes
            found = self.token_ids(best.indices).to(root.device).flatten(1).gather(1, indices)
            levels.append((found, above.gather(1, parent), log_p, torch.full_like(found, depth + 1)))
            width = min(self.width, count)
            tokens, log_p_above = found[:, :width], log_p[:, :width]
            above = torch.arange(num_nodes, num_nodes + width, device=root.device).expand(len(root), -1)
            num_nodes += count
            index = parent[:, :width, None].to(state[0].device)
            state = tuple(part.gather(1, index.expand(-1, -1, part.shape[-1])) for part in state)
        ids, parent, log_p, depths = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        chosen = tree.most_probable(log_p)
        nodes = chosen.shape[1]
        place = torch.zeros_like(ids).scatter_(1, chosen, torch.arange(nodes, device=ids.device).expand_as(chosen))
        parent = place.gather(1, parent.gather(1, chosen))
        topology = Topology.from_parents(parent, depths.gather(1, chosen), tree.max_depth, nodes - 1)
        return Draft(ids.gather(1, chosen), topology)

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """Sample a tree for each text in `frontier`, or `copies` independent trees if it has one text."""
        root, shared = frontier.root.repeat_interleave(copies), copies > 1
        rows = len(frontier.rows)
        assert not shared or rows == 1, "copies of one row only"
        everyone = torch.arange(len(root), device=root.device)
        # P distinct paths, sorted by row and predicted once each, have states [rows, P / rows, S] and last tokens
        # [rows, P / rows]; `path` [B, W] is the index of the path to each expanded node.
        state, tokens = self.begin(frontier), frontier.root[:, None]
        path = torch.arange(rows, device=root.device).repeat_interleave(copies)[:, None]
        ids, distributions, of_children, known = [root[:, None]], [], [path], 0
        counts = [width * most for width, most in self.drawn]
        u = draws.uniforms(everyone, sum(counts)).split(counts, dim=1)
        for depth, level in enumerate(self.levels):
            logits, state = self.step(depth, state, tokens, frontier.context_kv)
            q = target.draft_probabilities(frontier.rows, self.over_vocabulary(logits))
            q = q.flatten(0, 1).to(root.device)  # [P, V]
            distributions.append(q)
            known += len(q)
            width, most = self.drawn[depth]
            drawn = draw_distinct(q, path.flatten(), u[depth].reshape(-1, most)).view(len(root), width * most)
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


class PathDrafter(LevelwiseDrafter):
    """Drafts with sequential heads (`medusa.heads.sequential`): one head per level, which reads the path to a node."""

    def __init__(self, heads: SequentialHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Make a drafter that fills `tree`; raises a `RequestError` if heads, backbone and tree do not match."""
        require_draftable(heads.config, backbone.hidden_size, backbone.vocab_size, tree, target is not None)
        super().__init__(tree.to(backbone.device), target)
        self.heads, self.backbone, self.dtype = heads, backbone, heads.dtype
        self.lm_head = lm_head_for(heads, backbone)

    def begin(self, frontier: Frontier) -> State:
        return (frontier.hidden.to(self.heads.device, self.dtype)[:, None],)

    def step(self, depth: int, state: State, tokens: Tensor, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        embedded = self.heads.embed(tokens, self.backbone.embed)
        features, state = self.heads.step(depth, state, embedded, context_kv)
        return self.heads.logits_of(depth, features, self.lm_head), state

    def token_ids(self, guesses: Tensor) -> Tensor:
        return token_ids(self.heads, guesses)

    def over_vocabulary(self, logits: Tensor) -> Tensor:
        return over_all(self.heads, logits, self.backbone.vocab_size)
