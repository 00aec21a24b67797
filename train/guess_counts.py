"""Counts of the heads' right guesses, and the accuracies computed from these counts.

Shapes: K heads, P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.heads.guesses import accepted
from medusa.tree import Tree

TOPS = (1, 5, 10)


@dataclass(frozen=True)
class HeadAccuracy:
    """The accuracy of one head: how often its guesses are right."""

    head: int
    """Number of the head, counted from 1."""
    top: dict[str, float]
    """Share of labels that are among the head's best 1, 5 and 10 guesses, with the keys "1", "5" and "10"."""
    conditional_top1: float
    """Share of labels that are the head's best guess, at positions where the best guesses of earlier heads are all
    right."""


class GuessCounts:
    """Counts of the heads' right guesses, added up over batches and processes.

    The counts give the accuracy of each head and the expected tau (tokens per decoding step) of a tree: one plus the
    mean number of accepted guesses, over all positions. The expected tau takes every position as equally likely to
    start a step. In decoding, a step starts where the step before ended; `medusa benchmark` measures that tau. The
    expected tau needs no decoding, and usually rises and falls with the measured one.
    """

    def __init__(self, num_heads: int, tree: Tree | None = None) -> None:
        self.tree = tree
        self.hits = torch.zeros(num_heads, max(TOPS), dtype=torch.float64)  # labels by their rank among the guesses
        self.labels = torch.zeros(num_heads, dtype=torch.float64)
        self.given = torch.zeros(num_heads, dtype=torch.float64)  # positions where all earlier heads are right
        self.chained = torch.zeros(num_heads, dtype=torch.float64)  # those of them where this head is right, too
        self.walks = torch.zeros(2, dtype=torch.float64)  # numbers of accepted guesses and of positions

    def add(self, ranks: Tensor, labelled: Tensor) -> None:
        """Count the right guesses of K heads at P positions.

        Only positions where all heads have a label count for the conditional accuracies and the expected tau.

        Args:
            ranks: [K, P] rank of each label among its head's guesses, from 0 (`label_ranks`).
            labelled: [K, P] True where the head has a label.
        """
        ranks, labelled = ranks.cpu(), labelled.cpu()
        for rank in range(max(TOPS)):
            self.hits[:, rank] += ((ranks == rank) & labelled).sum(1)
        self.labels += labelled.sum(1)
        whole = ranks[:, labelled.all(0)]
        right = (whole == 0).long().cumprod(0)  # where this head and all earlier ones are right
        self.given += torch.cat([torch.ones_like(right[:1]), right[:-1]]).sum(1)
        self.chained += right.sum(1)
        if self.tree is not None:
            self.walks += torch.tensor([accepted(self.tree, whole.T).sum(), whole.shape[1]])

    def reduce(self, over_processes: Callable[[Tensor], Tensor]) -> None:
        """Replace each count by its sum over all processes; `over_processes` is the function that sums a tensor."""
        for name in ("hits", "labels", "given", "chained", "walks"):
            setattr(self, name, over_processes(getattr(self, name)))

    def figures(self) -> list[HeadAccuracy]:
        """Compute the accuracy of each head from the counts."""
        within = (self.hits.cumsum(1) / self.labels.clamp_min(1)[:, None]).tolist()
        chained = (self.chained / self.given.clamp_min(1)).tolist()
        return [
            HeadAccuracy(head, {str(top): round(shares[top - 1], 4) for top in TOPS}, round(chain, 4))
            for head, (shares, chain) in enumerate(zip(within, chained, strict=True), 1)
        ]

    @property
    def expected_tau(self) -> float:
        """Expected tau of the tree: the mean number of tokens per decoding step, including the root."""
        return float(1 + self.walks[0] / self.walks[1].clamp_min(1))
