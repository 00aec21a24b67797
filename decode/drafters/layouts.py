"""Trees of drafts: the tree that a user asks for (`resolve_tree`), and trees chosen in every step (`DynamicTree`).

A `DynamicTree` drafts the most probable nodes of a fixed set of candidates (EAGLE-2, OPT-Tree). The log probability of
a node's path is the sum of the heads' log confidences in its tokens. A child is never more probable than its parent,
so the most probable nodes form a tree. Every step drafts the same number of nodes, so tensor shapes are fixed. A
confidence is a softmax probability; `decode.bench.calibration` fits its temperature to how often guesses are correct.

Shapes: B texts, K heads, of which a tree of depth k uses k, R guesses of a head, V vocabulary, S candidates with the
root, N drafted nodes with the root, M nodes for which probabilities are given, D depth of the candidate tree."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.errors import OptionError, RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import RankPath, Tree, load_tree, usual_shortlist

TOP = 16  # number of most probable guesses of each head that a dynamic tree considers
MAX_NODES, MAX_CANDIDATES = 256, 1024
MIN_LOG_CONFIDENCE = -50.0  # smaller log confidences are raised to it; guesses this improbable never enter a tree
STEEPNESS = 1e-4  # subtracted from log confidences at each level, so that rounding never ranks a child above its parent


@dataclass(frozen=True, eq=False)
class DynamicTree:
    """A tree chosen in every step: at most `num_nodes` nodes (with the root), the most probable of `candidates`."""

    num_nodes: int
    candidates: Tree
    temperatures: tuple[float, ...] = ()  # of each head's softmax, for at least `max_depth` heads; empty: all are 1
    min_probability: float = 0.0  # nodes with a lower path probability are pruned, with their subtrees; 0: no pruning

    def __post_init__(self) -> None:
        if not 0 <= self.min_probability <= 1:
            raise OptionError("stop_drafting", f"is {self.min_probability}; it must be between 0 and 1 (0: never stop)")
        given = len(self.temperatures)
        if given and (given < self.max_depth or not all(t > 0 for t in self.temperatures)):
            raise RequestError(f"temperatures are {[*self.temperatures]}; give {self.max_depth} numbers above 0, or ()")

    @classmethod
    def over_heads(cls, num_nodes: int, num_heads: int, temperatures: tuple[float, ...] = ()) -> DynamicTree:
        """Make a dynamic tree for `num_heads` heads; raises a `RequestError` if `num_nodes` is out of range."""
        most = min(MAX_NODES, 1 + sum(TOP**depth for depth in range(1, num_heads + 1)))
        if not 2 <= num_nodes <= most:
            raise RequestError(f"dynamic:{num_nodes} is no tree for {num_heads} heads; give from 2 to {most} nodes")
        return cls(num_nodes, _candidates(num_nodes, num_heads), temperatures)

    @property
    def max_depth(self) -> int:
        return self.candidates.max_depth

    def to_json(self) -> dict[str, object]:
        """Return this tree's settings for results files: `num_nodes`, `temperatures` and, if set, `min_probability`."""
        content: dict[str, object] = {"dynamic": self.num_nodes, "temperatures": list(self.temperatures)}
        return content | ({"stop_drafting": self.min_probability} if self.min_probability else {})

    def to(self, device: torch.device | str) -> DynamicTree:
        if self.candidates.depth.device == torch.device(device):
            return self  # with its cached tables
        return replace(self, candidates=self.candidates.to(device))

    def clip(self, max_depth: int) -> DynamicTree:
        """Copy the tree without candidates deeper than `max_depth`. If too few are left, `num_nodes` is lowered."""
        candidates = self.candidates.clip(max_depth)
        return replace(self, candidates=candidates, num_nodes=min(self.num_nodes, candidates.num_nodes))

    @cached_property
    def _on_path(self) -> Tensor:
        """For each of S candidates, the indices [S, D] of its path's guesses in the flat table [D * R] of guesses."""
        tree, top = self.candidates, self.candidates.max_rank + 1
        place = (tree.depth - 1) * top + tree.rank
        return torch.where(tree.paths >= 0, place[tree.paths.clamp_min(0)], self.max_depth * top)[:, 1:]

    @cached_property
    def _scale(self) -> Tensor:
        """The temperatures [K] of K heads, kept on the device to save a transfer from the CPU in every step."""
        return torch.tensor(self.temperatures, device=self.candidates.depth.device)

    def prepare(self) -> None:
        """Make the tables that are kept, because torch.compile cannot trace the properties that make them."""
        _ = self._on_path, self._scale

    def log_confidences(self, logits: Tensor, head: int | None = None) -> Tensor:
        """Compute the log-softmax, at the heads' temperatures, of logits over V tokens.

        `logits` are [k, B, V] of the first k heads for B texts, or [..., V] of the head with the index `head`."""
        logits = logits.float()
        if self.temperatures:
            scale = self._scale.to(logits.device)
            logits = logits / (scale[: len(logits), None, None] if head is None else scale[head])
        return logits.log_softmax(-1)

    def path_log_probs(self, confidences: Tensor) -> Tensor:
        """Compute the log probabilities of the paths to S candidates in B texts, [B, S].

        `confidences` [B, k, R]: log probabilities of the R best guesses of k heads."""
        used = confidences[:, : self.max_depth, : self.candidates.max_rank + 1]
        known = F.pad(bounded(used).flatten(1), (0, 1))
        return known[:, self._on_path].sum(-1) - STEEPNESS * self.candidates.depth

    def num_worthwhile(self, log_probs: Tensor) -> int:
        """Count the nodes with path probability of at least `min_probability`; returns the largest count of all texts.

        `log_probs` [B, M]: log probabilities of the paths to M nodes in B texts."""
        if not self.min_probability:
            return log_probs.shape[1]
        return int((log_probs >= math.log(self.min_probability)).sum(1).max())  # waits for the device

    def most_probable(self, log_probs: Tensor) -> Tensor:
        """Choose the N nodes to draft in each of B texts: ascending indices [B, N], root included.

        `log_probs` [B, S]: log probabilities of the paths to S nodes, the root first."""
        count = min(self.num_nodes - 1, self.num_worthwhile(log_probs[:, 1:]))
        best = log_probs[:, 1:].topk(count, dim=-1, sorted=False).indices + 1
        return F.pad(best.sort(dim=-1).values, (1, 0))


Layout = Tree | DynamicTree
"""A tree whose nodes are fixed, or a tree whose nodes are chosen in every step."""
TreeLike = Layout | str | Sequence[Sequence[int]] | None
"""A tree as users give it: an object, a name or file, a list of paths, or `None` for the tree saved with the heads."""


def shortlist_of(tree: Layout) -> int:
    """The number of candidates of each head from which a tree of `markov` heads takes its nodes."""
    return tree.candidates.shortlist or usual_shortlist(tree.num_nodes)


def with_shortlist(tree: Layout, shortlist: int | None) -> Layout:
    """Copy a tree, which then takes its nodes from `shortlist` candidates of each head (`Tree.shortlist`)."""
    candidates = replace(tree.candidates, shortlist=shortlist)
    return replace(tree, candidates=candidates) if isinstance(tree, DynamicTree) else candidates


def smaller(tree: Layout, nodes: int) -> Layout:
    """Copy a tree with at most so many `nodes`, root included: those that usually are the most probable ones."""
    if isinstance(tree, DynamicTree):
        tree = tree.clip(min(nodes - 1, tree.max_depth))
        return replace(tree, num_nodes=min(nodes, tree.num_nodes))
    kept = sorted(tree.rank_paths, key=_measure)[: nodes - 1]
    return with_shortlist(Tree.from_paths(kept), tree.shortlist)


def _measure(path: RankPath) -> int:
    """The number of paths that are never less probable than a path, itself included (`_candidates`)."""
    return sum(accumulate((rank + 1 for rank in path), operator.mul))


def bounded(confidences: Tensor) -> Tensor:
    """Raise log confidences to at least `MIN_LOG_CONFIDENCE`, and replace NaN (from overflow in float16) by this value.

    Next to lower values, float32 would round away `STEEPNESS`, the small amount that ranks a parent above an equally
    probable child. `topk` would rank NaN first."""
    return confidences.nan_to_num(nan=MIN_LOG_CONFIDENCE, neginf=MIN_LOG_CONFIDENCE).clamp_min(MIN_LOG_CONFIDENCE)


def _candidates(num_nodes: int, num_heads: int) -> Tree:
    """Make the tree of all paths that could be among the `num_nodes` - 1 most probable, whatever the confidences are.

    A path of ranks r1, r2, ... is never more probable than a path that is no longer and has no greater rank at any
    depth. There are (r1 + 1) + (r1 + 1)(r2 + 1) + ... such paths, itself included: the path's measure. Paths with a
    measure above `num_nodes` - 1 are left out. Ranks stay below TOP, and the tree has at most MAX_CANDIDATES nodes."""
    paths: list[RankPath] = []
    # (measure, path), and for the path without its last rank, its measure and the product of all r + 1.
    open_paths: list[tuple[int, RankPath, int, int]] = [(1, (0,), 0, 1)]
    while open_paths and len(paths) < MAX_CANDIDATES - 1:
        measure, path, above, product = heapq.heappop(open_paths)
        if measure > num_nodes - 1:
            break
        paths.append(path)
        *prefix, rank = path
        if rank + 1 < TOP:
            heapq.heappush(open_paths, (measure + product, (*prefix, rank + 1), above, product))
        if len(path) < num_heads:
            product *= rank + 1
            heapq.heappush(open_paths, (measure + product, (*path, 0), measure, product))
    return Tree.from_paths(paths)


def resolve_tree(tree: TreeLike, heads: MedusaHeads, stop_drafting: float = 0.0) -> Layout:
    """Return the tree that `tree` describes; for `None`, the tree saved with the heads, or a default tree.

    A dynamic tree prunes paths less probable than `stop_drafting` (0: no pruning). Raise a `RequestError` if `tree`
    describes no tree, or if it describes a static tree and `stop_drafting` is not 0."""
    resolved = _resolved(tree, heads)
    if not stop_drafting:
        return resolved
    if not isinstance(resolved, DynamicTree):
        raise OptionError("stop_drafting", "works only with a dynamic tree; use tree dynamic:N")
    return replace(resolved, min_probability=stop_drafting)


def _resolved(tree: TreeLike, heads: MedusaHeads) -> Layout:
    if isinstance(tree, Tree | DynamicTree):
        return tree
    num_heads, saved = heads.config.num_heads, heads.config.tree
    if tree == "auto" or (tree is None and not saved):  # callers that can calibrate replace "auto" before
        return default_tree(heads)
    if isinstance(tree, str) and tree.startswith("dynamic"):
        name, _, number = tree.partition(":")
        if name != "dynamic" or not number.isdecimal() or len(number) > 9:
            raise RequestError(f"{tree!r} is no tree; write dynamic: and a number of nodes, such as dynamic:16")
        return DynamicTree.over_heads(int(number), num_heads)
    if isinstance(tree, str):
        return load_tree(tree, num_heads)
    paths = saved if tree is None else tree
    if not isinstance(paths, (list, tuple)):
        raise RequestError(f"{tree!r} is no tree; give a name, a file or a list of paths such as [[0], [1], [0, 0]]")
    return Tree.from_paths(paths)


def default_tree(heads: MedusaHeads) -> Tree:
    """The tree for heads without a saved tree: 8 nodes on a CPU, the paper's 64 on a GPU, where nodes are cheap."""
    name = "eight" if heads.device.type == "cpu" else "mc_sim_7b_63"
    return load_tree(name, heads.config.num_heads).clip(heads.config.num_heads)


def require_draftable(config: MedusaConfig, hidden_size: int, vocab_size: int, tree: Layout, drawn: bool) -> None:
    """Raise a `RequestError` if heads do not fit the backbone or `tree`, or if a dynamic tree is `drawn` (sampled)."""
    require_sizes(config, hidden_size, vocab_size)
    tree.candidates.require_fit(config.num_heads, config.draft_vocab_size(vocab_size))
    if drawn and isinstance(tree, DynamicTree):  # it depends on the guesses, so that samples of it would be biased
        raise RequestError("a dynamic tree cannot be combined with draft sample; use draft topk")


def require_sizes(config: MedusaConfig, hidden_size: int, vocab_size: int) -> None:
    """Raise a `RequestError` if the heads' hidden size or vocabulary size differs from the backbone's."""
    owner = f"they belong to {config.base_model_name_or_path or 'another backbone'}"
    if config.hidden_size != hidden_size:
        raise RequestError(f"the heads have hidden size {config.hidden_size} but the backbone {hidden_size}; {owner}")
    if config.vocab_size not in (None, vocab_size):
        raise RequestError(f"the heads have vocabulary size {config.vocab_size} but the backbone {vocab_size}; {owner}")
