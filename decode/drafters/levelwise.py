"""Drafters that grow a tree level by level: each level's `step` predicts the children of its expanded nodes.

A node is expanded if it gets children. A static tree fixes which nodes are expanded. A dynamic tree expands the most
probable nodes of each level, equally many in every step unless `min_probability` prunes the tree. In a sampled tree
(`--draft sample`), the children of a node are drawn from the drafter's distribution there.

Shapes: B rows, M nodes of a level, W expanded nodes of a level, R guesses considered per node, S size of a drafter's
state at a node, V vocabulary, C tokens among which a step guesses, N nodes of the tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft, Frontier, Proposal
from decode.drafters.heads import UsesHeads
from decode.drafters.layouts import STEEPNESS, TOP, DynamicTree, Layout, bounded
from decode.ops.draws import Draws, draw_distinct
from decode.ops.fast_topk import top_k
from decode.target import Target
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.sequential import SequentialHeads
from medusa.tree import Tree

State = Any  # what the steps of a drafter pass on: tensors that only its own steps read


class Level(NamedTuple):
    """One level of a static tree: M nodes of equal depth, whose parents are the W expanded nodes of the level above."""

    parent: Tensor  # [M] index of each node's parent among the W expanded nodes of the level above
    top: int  # R, the number of best guesses after each expanded node that hold the tokens of all children
    guess: Tensor  # [M] index of each node's token among the W * R best guesses
    place: Tensor  # [M] index of each node among its siblings
    expanded: Tensor  # [W of the next level] indices of the expanded nodes among the M nodes of this level
    above: Tensor  # [W of the next level] indices of these nodes' parents, as in `parent`


class Guesses(NamedTuple):
    """What a step predicts for the children of W nodes in each of B texts."""

    logits: Tensor  # [B, W, C]
    state: State  # for the next step
    ids: Tensor | None = None  # [C], or [B, C] for each text, the ids of the C tokens; `None`: all V tokens in order
    held: Tensor | None = None  # [B, 1, 1] the log probability of all C tokens together in a dynamic tree; `None`: 0

    def tokens(self, places: Tensor) -> Tensor:
        """Convert indices [B, ...] among the C tokens to token ids of the same shape."""
        if self.ids is None:
            return places
        ids = self.ids.to(places.device)
        return ids[places] if ids.ndim == 1 else ids.gather(1, places.flatten(1)).view_as(places)

    def over(self, vocab_size: int) -> Tensor:
        """Expand the logits to those of all V = `vocab_size` tokens, [B, W, V]; other tokens get -inf."""
        if self.ids is None:
            return self.logits
        spread = self.logits.new_full((*self.logits.shape[:-1], vocab_size), -torch.inf)
        ids = self.ids.to(self.logits.device).view(-1, 1, self.ids.shape[-1])
        return spread.scatter_(-1, ids.expand_as(self.logits), self.logits)


def levels_of(tree: Tree) -> list[Level]:
    """Split a static tree into its levels: the nodes of depth 1, of depth 2, and so on."""
    levels, has_children = [], torch.zeros_like(tree.parent, dtype=torch.bool)
    has_children[tree.parent[1:]] = True
    position = torch.zeros_like(tree.parent)  # index of an expanded node among those of its depth
    for depth in range(1, tree.max_depth + 1):
        nodes = (tree.depth == depth).nonzero()[:, 0]
        expanded = has_children[nodes].nonzero()[:, 0]
        parent, rank = position[tree.parent[nodes]], tree.rank[nodes]
        top = int(rank.max()) + 1
        levels.append(Level(parent, top, parent * top + rank, tree.order[nodes], expanded, parent[expanded]))
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

    def __init__(self, tree: Layout, vocab_size: int, target: Target | None = None) -> None:
        self.tree, self.vocab_size = tree, vocab_size  # V, the backbone's
        self.target = target  # the target holds the sampling options and random draws of the texts
        if isinstance(tree, DynamicTree):
            self.width = width_of(tree)
            tree.prepare()
            return
        self.levels, self.topology = levels_of(tree.candidates), Topology.of(tree.candidates)
        # By level: the expanded nodes of the level above, and the most children of one, for draws.
        self.drawn = [(int(level.parent.max()) + 1, int(level.place.max()) + 1) for level in self.levels]

    @abstractmethod
    def begin(self, frontier: Frontier) -> State:
        """Make the state from which the first `step` predicts the root's children in each of B texts."""

    @abstractmethod
    def step(self, depth: int, state: State, parent: Tensor, tokens: Tensor, context_kv: ContextKV | None) -> Guesses:
        """Predict the children of W nodes at `depth` in each of B texts.

        `state` is that of the step above, `parent` [B, W] are the indices of the nodes' parents among its nodes (for
        the root: 0), and `tokens` [B, W] the nodes' tokens."""

    def propose(self, frontier: Frontier) -> Draft:
        """Draft a tree for each text in `frontier`: a static, a dynamic or a sampled tree."""
        if self.tree.max_depth == 0:
            return Draft(frontier.root[:, None], self.topology)
        if isinstance(self.tree, DynamicTree):
            return self._dynamic(frontier, self.tree)
        if self.target is not None:
            return self.draw(frontier, self.target, self.target.draws.of(frontier.rows))
        return self._static(frontier)

    def _static(self, frontier: Frontier) -> Draft:
        """Draft a static tree: the best guesses of each level."""
        root = frontier.root[:, None]
        ids, state, parent, tokens = [root], self.begin(frontier), torch.zeros_like(root), root
        for depth, level in enumerate(self.levels):
            guesses = self.step(depth, state, parent, tokens, frontier.context_kv)
            best = guesses.tokens(top_k(guesses.logits, level.top).indices).flatten(1).to(root.device)  # [B, W * R]
            found = best.index_select(1, level.guess)
            ids.append(found)
            state, parent = guesses.state, level.above.expand(len(root), -1)
            tokens = found.index_select(1, level.expanded)
        return Draft(torch.cat(ids, dim=1), self.topology)

    def _dynamic(self, frontier: Frontier, tree: DynamicTree) -> Draft:
        """Draft a dynamic tree: expand the most probable nodes of each level, then keep the most probable nodes."""
        root = frontier.root[:, None]
        zero, log_p_above = torch.zeros_like(root), torch.zeros(root.shape, device=root.device)
        # Per level [B, M]: ids, parents among all nodes, log probabilities, depths.
        levels, above, num_nodes = [(root, zero, log_p_above, zero)], 0, 1  # `above`: the first node of the level above
        state, of_nodes, tokens = self.begin(frontier), zero, root
        for depth in range(tree.max_depth):
            guesses = self.step(depth, state, of_nodes, tokens, frontier.context_kv)
            state, confidences = guesses.state, tree.log_confidences(guesses.logits, depth)
            confidences = confidences if guesses.held is None else confidences + guesses.held
            best = top_k(confidences, min(TOP, tree.num_nodes - 1, confidences.shape[-1]))  # [B, W, R]
            log_p = (bounded(best.values.to(root.device)) - STEEPNESS + log_p_above[:, :, None]).flatten(1)
            log_p, indices = log_p.topk(min(tree.num_nodes - 1, log_p.shape[1]), dim=-1)  # [B, M], the best first
            count = min(log_p.shape[1], tree.num_worthwhile(log_p))
            if not count:  # deeper nodes are even less probable
                break
            log_p, indices = log_p[:, :count], indices[:, :count]
            parent = indices // best.values.shape[-1]  # [B, M] index among the W nodes
            found = guesses.tokens(best.indices).to(root.device).flatten(1).gather(1, indices)
            levels.append((found, parent + above, log_p, torch.full_like(found, depth + 1)))
            width = min(self.width, count)
            tokens, log_p_above, of_nodes = found[:, :width], log_p[:, :width], parent[:, :width]
            above, num_nodes = num_nodes, num_nodes + count
        ids, parent, log_p, depths = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
        chosen = tree.most_probable(log_p)
        nodes, depths = chosen.shape[1], depths.gather(1, chosen)
        place = torch.zeros_like(ids).scatter_(1, chosen, torch.arange(nodes, device=ids.device).expand_as(chosen))
        parent = place.gather(1, parent.gather(1, chosen))
        topology = Topology.from_parents(parent, depths, tree.max_depth, nodes - 1)
        return Draft(ids.gather(1, chosen), topology, log_probs=log_p.gather(1, chosen))

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """Sample a tree for each text in `frontier`, or `copies` independent trees if it has one text."""
        root, shared = frontier.root.repeat_interleave(copies), copies > 1
        rows = len(frontier.rows)
        assert not shared or rows == 1, "copies of one row only"
        everyone = torch.arange(len(root), device=root.device)
        # P distinct paths, sorted by row and predicted once each, have parents and last tokens [rows, P / rows];
        # `path` [B, W] is the index of the path to each expanded node.
        state, tokens = self.begin(frontier), frontier.root[:, None]
        parent = torch.zeros_like(tokens)
        path = torch.arange(rows, device=root.device).repeat_interleave(copies)[:, None]
        ids, distributions, of_children, known = [root[:, None]], [], [path], 0
        counts = [width * most for width, most in self.drawn]
        u = draws.uniforms(everyone, sum(counts)).split(counts, dim=1)
        for depth, level in enumerate(self.levels):
            guesses = self.step(depth, state, parent, tokens, frontier.context_kv)
            state = guesses.state
            q = target.draft_probabilities(frontier.rows, guesses.over(self.vocab_size))
            per_row, q = q.shape[1], q.flatten(0, 1).to(root.device)  # [P, V]
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
            parent, tokens = (part.view(rows, -1) for part in (paths // q.shape[-1] % per_row, paths % q.shape[-1]))
            own = torch.zeros_like(found)
            own[:, level.expanded] = known + path
            of_children.append(own)
        proposal = Proposal(torch.cat(distributions), torch.cat(of_children, dim=1))
        return Draft(torch.cat(ids, dim=1), self.topology, proposal)


class PathDrafter(UsesHeads, LevelwiseDrafter):
    """Drafts with sequential heads (`medusa.heads.sequential`): one head per level, which reads the path to a node."""

    heads: SequentialHeads

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        UsesHeads.__init__(self, heads, backbone, tree, target)
        LevelwiseDrafter.__init__(self, self.tree, backbone.vocab_size, target)

    def begin(self, frontier: Frontier) -> State:
        return (self.hidden(frontier)[:, None],)

    def step(self, depth: int, state: State, parent: Tensor, tokens: Tensor, context_kv: ContextKV | None) -> Guesses:
        features, state = self.heads.step(depth, selected(state, parent), self.embed(tokens), context_kv)
        return Guesses(self.heads.logits_of(depth, features, self.lm_head), state, self.heads.vocabulary)


def selected(state: tuple[Tensor, ...], parent: Tensor) -> tuple[Tensor, ...]:
    """Select the states [B, W, S] of nodes by their indices `parent` [B, W] from the states of the level above."""
    index = parent.to(state[0].device)[:, :, None]
    return tuple(part.gather(1, index.expand(-1, -1, part.shape[-1])) for part in state)
