"""Trees that change from step to step: of a fixed set of candidates, those that the drafter believes in most.

A node's worth is the product of its drafter's confidences along its path (EAGLE-2, OPT-Tree); with the same number of
nodes in every step, shapes stay fixed and only the topology moves. A child is never worth more than its parent, so the
most probable nodes hang together. Confidences are softmaxes at a temperature of each head's own, fitted on text that
the backbone wrote (`decode.bench.calibration`): heads are often less, or more, sure than they are right.

Shapes: B rows, K heads, R guesses of a head, S candidates, N nodes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.topology import Topology, chosen_part
from medusa.errors import RequestError
from medusa.tree import RankPath, Tree

TOP = 16
"""Guesses of a head that are looked at."""
MOST_NODES, MOST_CANDIDATES = 256, 1024
LEAST = -50.0
"""Log confidences below are taken for this: no tree reaches so far down."""
STEEPNESS = 1e-4
"""Subtracted per level from log confidences, so that a child of a sure guess comes after its parent, rounded or not."""


@dataclass(frozen=True, eq=False)
class DynamicTree:
    """In every step the `num_nodes` (root included) of `candidates` in which the heads believe most."""

    num_nodes: int
    candidates: Tree
    temperatures: tuple[float, ...] = ()
    """Of each head's confidences, one for every head that the candidates reach; 1 where none are given."""
    min_confidence: float = 0.0
    """Nodes whose path probability is below this are not drafted, with their subtrees; 0 keeps all."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_confidence <= 1:
            raise RequestError(
                f"a confidence to stop drafting at is {self.min_confidence}; it must lie between 0 (never) and 1"
            )
        given = len(self.temperatures)
        if given and (given < self.max_depth or not all(t > 0 for t in self.temperatures)):
            raise RequestError(
                f"temperatures are {list(self.temperatures)}; give {self.max_depth} numbers above 0, one a head, or ()"
            )

    @classmethod
    def over_heads(cls, num_nodes: int, num_heads: int, temperatures: tuple[float, ...] = ()) -> DynamicTree:
        """Raises:
        RequestError: no such number of nodes."""
        most = min(MOST_NODES, 1 + sum(TOP**depth for depth in range(1, num_heads + 1)))
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
        """What results hold of the tree."""
        content: dict[str, object] = {"dynamic": self.num_nodes, "temperatures": list(self.temperatures)}
        return content | ({"stop_drafting": self.min_confidence} if self.min_confidence else {})

    def to(self, device: torch.device | str) -> DynamicTree:
        if self.candidates.depth.device == torch.device(device):
            return self  # with its table
        return replace(self, candidates=self.candidates.to(device))

    def clip(self, max_depth: int) -> DynamicTree:
        """Without what is deeper than `max_depth`; fewer nodes if no more are left."""
        candidates = self.candidates.clip(max_depth)
        return replace(self, candidates=candidates, num_nodes=min(self.num_nodes, candidates.num_nodes))

    def require_fit(self, num_heads: int, vocab_size: int, name: str = "the tree") -> None:
        """Raises:
        RequestError: as `Tree.require_fit`."""
        self.candidates.require_fit(num_heads, vocab_size, name)

    @cached_property
    def _on_the_way(self) -> Tensor:
        """[S, D] the places in the flattened [K, R] table of the guesses on the way to each candidate; K R is none."""
        tree, top = self.candidates, self.candidates.max_rank + 1
        place = (tree.depth - 1) * top + tree.rank
        return torch.where(tree.paths >= 0, place[tree.paths.clamp_min(0)], self.max_depth * top)[:, 1:]

    @cached_property
    def _scale(self) -> Tensor:
        """[K, 1, 1] temperatures; made once, as every copy to a device is one that a step waits for."""
        return torch.tensor(self.temperatures, device=self.candidates.depth.device)[:, None, None]

    def log_confidences(self, logits: Tensor, head: int | None = None) -> Tensor:
        """logits [k, B, V] of the heads -> log probabilities at each head's temperature [k, B, V], float32.

        With a `head`, all logits [..., V] are of that one.
        """
        if self.temperatures and head is not None:
            logits = logits.float() / self.temperatures[head]
        elif self.temperatures:
            logits = logits.float() / self._scale[: len(logits)].to(logits.device)
        return logits.log_softmax(-1, dtype=torch.float32)

    def worth(self, confidences: Tensor) -> Tensor:
        """log confidences [B, k, R] of each head's best guesses -> of each candidate's whole path [B, S]."""
        used = confidences[:, : self.max_depth, : self.candidates.max_rank + 1]
        known = F.pad(bounded(used).flatten(1), (0, 1))
        return known[:, self._on_the_way].sum(-1) - STEEPNESS * self.candidates.depth

    def reached(self, worth: Tensor) -> int:
        """worth [B, M] of nodes -> how many of them are to be had in the row with most that are worth it.

        Rows of a batch have one shape, so those that believe in fewer get their next best ones as well.
        """
        if not self.min_confidence:
            return worth.shape[1]
        return int((worth >= math.log(self.min_confidence)).sum(1).max())  # waits for the device

    def choose(self, worth: Tensor) -> tuple[Tensor, Topology]:
        """worth [B, S] -> the nodes that are taken, ascending [B, N], and how they hang together."""
        count = min(self.num_nodes - 1, self.reached(worth[:, 1:]))
        best = worth[:, 1:].topk(count, dim=-1, sorted=False).indices + 1
        chosen = torch.cat([torch.zeros_like(worth[:, :1], dtype=torch.long), best.sort(dim=-1).values], dim=1)
        return chosen, chosen_part(self.candidates, chosen)


def bounded(confidences: Tensor) -> Tensor:
    """Log confidences, finite, and not so small that a level more or less would be lost in rounding.

    What is no number (heads that overflow in float16) is worth nothing: `topk` would take it for the greatest, a child
    could be taken without its parent, and its position and past would be wrong, and with them the text.
    """
    return confidences.nan_to_num(nan=LEAST, neginf=LEAST).clamp_min(LEAST)


def _candidates(num_nodes: int, num_heads: int) -> Tree:
    """All paths that can be among the `num_nodes` - 1 most probable ones, whatever the confidences.

    As likely as a path of ranks r1, r2, ... at least are all paths of its length and of its prefixes' lengths with no
    greater ranks: (r1 + 1) + (r1 + 1)(r2 + 1) + ... of them, itself included. So it has no chance where these are more
    than there are nodes. Beyond MOST_CANDIDATES or rank TOP, the least promising by that measure are left out.
    """
    paths: list[RankPath] = []
    # By that measure: it, the path, and for the path without its last rank the measure and the product of (r + 1).
    open_paths: list[tuple[int, RankPath, int, int]] = [(1, (0,), 0, 1)]
    while open_paths and len(paths) < MOST_CANDIDATES - 1:
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
