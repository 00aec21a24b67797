"""The trees that drafts are laid out on: what a user asks for, and trees that are chosen in every step.

A `DynamicTree` drafts the most probable nodes of a fixed set of candidates. The log probability of a path is the sum of
its drafter's log confidences (EAGLE-2, OPT-Tree). Every step drafts the same number of nodes, so shapes are fixed and
only the topology changes. A child is never more probable than its parent, so the most probable nodes are connected. A
confidence is a softmax at the head's temperature, which is fitted on text that the backbone wrote
(`decode.bench.calibration`), because heads are often too confident or not confident enough.

Shapes: B rows, K heads, R guesses of a head, S candidates, N nodes, M nodes of any set.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout, RankPath, Tree, load_tree

TreeLike = Layout | str | Sequence[Sequence[int]] | None
"""A tree, its name or file, its paths, or `None` for the tree saved with the heads."""
TOP = 16
"""Guesses of a head that are considered."""
MAX_NODES, MAX_CANDIDATES = 256, 1024
MIN_LOG_CONFIDENCE = -50.0
"""Smaller log confidences are raised to this; no tree reaches such guesses."""
STEEPNESS = 1e-4
"""Subtracted from log confidences per level, so that rounding never ranks a child before its parent."""


@dataclass(frozen=True, eq=False)
class DynamicTree:
    """In every step, the `num_nodes` most probable nodes (root included) of `candidates`."""

    num_nodes: int
    candidates: Tree
    temperatures: tuple[float, ...] = ()
    """One temperature for each head that the candidates reach; empty: all are 1."""
    min_probability: float = 0.0
    """Nodes whose path probability is lower are pruned with their subtrees; 0 keeps all nodes."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_probability <= 1:
            raise RequestError(f"stop-drafting is {self.min_probability}; it must be between 0 and 1 (0: never stop)")
        given = len(self.temperatures)
        if given and (given < self.max_depth or not all(t > 0 for t in self.temperatures)):
            raise RequestError(
                f"temperatures are {list(self.temperatures)}; give {self.max_depth} numbers above 0, or ()"
            )

    @classmethod
    def over_heads(cls, num_nodes: int, num_heads: int, temperatures: tuple[float, ...] = ()) -> DynamicTree:
        """The tree of `num_nodes` nodes for the guesses of `num_heads` heads.

        Raises:
            RequestError: the number of nodes is out of range."""
        most = min(MAX_NODES, 1 + sum(TOP**depth for depth in range(1, num_heads + 1)))
        if not 2 <= num_nodes <= most:
            raise RequestError(f"dynamic:{num_nodes} is no tree for {num_heads} heads; give from 2 to {most} nodes")
        return cls(num_nodes, _candidates(num_nodes, num_heads), temperatures)

    @property
    def is_dynamic(self) -> bool:
        return True

    @property
    def max_depth(self) -> int:
        return self.candidates.max_depth

    def to_json(self) -> dict[str, object]:
        """The tree as JSON, for results."""
        content: dict[str, object] = {"dynamic": self.num_nodes, "temperatures": list(self.temperatures)}
        return content | ({"stop_drafting": self.min_probability} if self.min_probability else {})

    def to(self, device: torch.device | str) -> DynamicTree:
        """The same tree with its tensors on `device`."""
        if self.candidates.depth.device == torch.device(device):
            return self  # with its cached tables
        return replace(self, candidates=self.candidates.to(device))

    def clip(self, max_depth: int) -> DynamicTree:
        """The tree without candidates deeper than `max_depth`; it has fewer nodes if no more are left."""
        candidates = self.candidates.clip(max_depth)
        return replace(self, candidates=candidates, num_nodes=min(self.num_nodes, candidates.num_nodes))

    def require_fit(self, num_heads: int, vocab_size: int, name: str = "the tree") -> None:
        """Check the candidates as `Tree.require_fit` does."""
        self.candidates.require_fit(num_heads, vocab_size, name)

    @cached_property
    def _on_path(self) -> Tensor:
        """[S, D] the guesses on each candidate's path, as places in the flattened [K, R] table; K R stands for none."""
        tree, top = self.candidates, self.candidates.max_rank + 1
        place = (tree.depth - 1) * top + tree.rank
        return torch.where(tree.paths >= 0, place[tree.paths.clamp_min(0)], self.max_depth * top)[:, 1:]

    @cached_property
    def _scale(self) -> Tensor:
        """[K, 1, 1] the temperatures; cached, because a step waits for every copy to a device."""
        return torch.tensor(self.temperatures, device=self.candidates.depth.device)[:, None, None]

    def log_confidences(self, logits: Tensor, head: int | None = None) -> Tensor:
        """Log probabilities [k, B, V] of the heads' logits [k, B, V] at each head's temperature, float32.

        With `head`, all logits [..., V] are of that head.
        """
        if self.temperatures and head is not None:
            logits = logits.float() / self.temperatures[head]
        elif self.temperatures:
            logits = logits.float() / self._scale[: len(logits)].to(logits.device)
        return logits.log_softmax(-1, dtype=torch.float32)

    def path_log_probs(self, confidences: Tensor) -> Tensor:
        """The log probability of each candidate's path [B, S], from log confidences [B, k, R] of the best guesses."""
        used = confidences[:, : self.max_depth, : self.candidates.max_rank + 1]
        known = F.pad(bounded(used).flatten(1), (0, 1))
        return known[:, self._on_path].sum(-1) - STEEPNESS * self.candidates.depth

    def num_worthwhile(self, log_probs: Tensor) -> int:
        """How many nodes reach `min_probability` in the row with most of them, from path log probabilities [B, M].

        All rows of a batch draft the same number of nodes, so the other rows also draft less probable ones.
        """
        if not self.min_probability:
            return log_probs.shape[1]
        return int((log_probs >= math.log(self.min_probability)).sum(1).max())  # waits for the device

    def most_probable(self, log_probs: Tensor) -> Tensor:
        """The nodes to draft, root included, ascending [B, N], from path log probabilities [B, S] with the root's."""
        count = min(self.num_nodes - 1, self.num_worthwhile(log_probs[:, 1:]))
        best = log_probs[:, 1:].topk(count, dim=-1, sorted=False).indices + 1
        return F.pad(best.sort(dim=-1).values, (1, 0))


def bounded(confidences: Tensor) -> Tensor:
    """Log confidences made finite, and large enough that rounding does not lose the difference of a level.

    NaN (from heads that overflow in float16) becomes the minimum. `topk` treats NaN as the maximum, so it would choose
    a child without its parent, and the text could be wrong.
    """
    return confidences.nan_to_num(nan=MIN_LOG_CONFIDENCE, neginf=MIN_LOG_CONFIDENCE).clamp_min(MIN_LOG_CONFIDENCE)


def _candidates(num_nodes: int, num_heads: int) -> Tree:
    """All paths that can be among the `num_nodes` - 1 most probable ones, for any confidences.

    For a path of ranks r1, r2, ..., all paths that are not longer and whose ranks are not greater are at least as
    probable: (r1 + 1) + (r1 + 1)(r2 + 1) + ... paths, itself included. If this measure exceeds the number of nodes, the
    path is never chosen. Of more than MAX_CANDIDATES paths, those with the greatest measure are left out, as are ranks
    from TOP on.
    """
    paths: list[RankPath] = []
    # (measure, path), and for the path without its last rank the measure and the product of all r + 1.
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
    """The given tree (object, name, file or paths), else the one saved with the heads, else a default.

    `stop_drafting`: the path probability below which a dynamic tree prunes nodes; 0: it drafts all its nodes.

    Raises:
        RequestError: `tree` describes no tree, or a static tree is asked to stop drafting.
    """
    resolved = _resolved(tree, heads)
    if not stop_drafting:
        return resolved
    if not isinstance(resolved, DynamicTree):
        raise RequestError("stop-drafting works only with a dynamic tree; use tree dynamic:N")
    return replace(resolved, min_probability=stop_drafting)


def _resolved(tree: TreeLike, heads: MedusaHeads) -> Layout:
    if isinstance(tree, Tree | DynamicTree):
        return tree
    num_heads, saved = heads.config.num_heads, heads.config.tree
    if tree == "auto" or (tree is None and not saved):  # callers that can calibrate replace "auto" before
        return default_tree(heads)
    if isinstance(tree, str) and tree.startswith("dynamic"):
        name, _, number = tree.partition(":")
        if name != "dynamic" or not number.isdecimal():
            raise RequestError(f"{tree!r} is no tree; write dynamic: and a number of nodes, such as dynamic:16")
        return DynamicTree.over_heads(int(number), num_heads)
    if isinstance(tree, str):
        return load_tree(tree, num_heads)
    paths = saved if tree is None else tree
    if not isinstance(paths, (list, tuple)):
        raise RequestError(f"{tree!r} is no tree; give a name, a file or a list of paths such as [[0], [1], [0, 0]]")
    return Tree.from_paths(paths)


def default_tree(heads: MedusaHeads) -> Tree:
    """A tree for heads without any measurement: eight nodes on a CPU, the published 64 on a GPU.

    On a GPU, reading the weights takes most of a step, so nodes are nearly free. A CPU computes them one by one.
    """
    name = "eight" if heads.device.type == "cpu" else "mc_sim_7b_63"
    return load_tree(name, heads.config.num_heads).clip(heads.config.num_heads)


def require_draftable(config: MedusaConfig, backbone: Backbone, tree: Layout, drawn: bool) -> None:
    """Raise a `RequestError` if the heads do not fit the backbone, or cannot fill or draw the tree."""
    require_sizes(config, backbone.hidden_size, backbone.vocab_size)
    tree.require_fit(config.num_heads, config.draft_vocab_size(backbone.vocab_size))
    if drawn:
        require_drawable(tree)


def require_drawable(tree: Layout) -> None:
    """Raise a `RequestError` for a dynamic tree: its guesses choose its nodes, so they cannot be drawn."""
    if tree.is_dynamic:
        raise RequestError("a dynamic tree cannot be combined with draft sample; use draft topk")


def require_sizes(config: MedusaConfig, hidden_size: int, vocab_size: int) -> None:
    """Raise a `RequestError` if the heads were made for another hidden size or vocabulary."""
    owner = f"they belong to {config.base_model_name_or_path or 'another backbone'}"
    if config.hidden_size != hidden_size:
        raise RequestError(f"the heads have hidden size {config.hidden_size} but the backbone {hidden_size}; {owner}")
    if config.vocab_size not in (None, vocab_size):
        raise RequestError(
            f"the heads have a vocabulary of {config.vocab_size} but the backbone one of {vocab_size}; {owner}"
        )
