"""Intervals of figures by resampling (a bootstrap), paired between the methods that are compared.

Rounds and batches of prompts are drawn repeatedly, with replacement, and 95 % of the resampled figures lie in the
interval. Both sides of a ratio keep the same draw, because they decoded the same prompts in the same rounds. So an
interval shows how far the figure may move with other prompts of the same kind, or at another time on this machine.
Figures of another machine may lie outside.

Shapes: R rounds, D draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode.bench.figures import Interval, PromptFigures

NUM_DRAWS = 2000
COVERAGE = 0.95


class Resampling(NamedTuple):
    """Draws of batches and rounds, shared by all figures that are compared."""

    batches: Tensor
    """[D, number of batches] how often each batch is drawn."""
    rounds: Tensor
    """[D, R] the round that is drawn instead of each round."""


@dataclass
class Sample:
    """The counts and times of one method, summed over the prompts of each batch. Batches are the resampled units."""

    new_tokens: Tensor  # [batches]
    steps: Tensor
    uncut_tokens: Tensor
    seconds: Tensor  # [R, batches]

    @classmethod
    def of(cls, prompts: Sequence[PromptFigures]) -> Sample:
        """Sum up figures of prompts, from this run or from the JSON of an earlier one."""
        batches = sorted({prompt.batch for prompt in prompts})
        groups = [[prompt for prompt in prompts if prompt.batch == batch] for batch in batches]
        rows = [[[p.new_tokens, p.steps, p.uncut_tokens, *p.seconds] for p in group] for group in groups]
        new_tokens, steps, uncut_tokens, *seconds = torch.stack([torch.tensor(row).double().sum(0) for row in rows], 1)
        return cls(new_tokens.float(), steps.float(), uncut_tokens.float(), torch.stack(seconds).float())

    @property
    def num_batches(self) -> int:
        return len(self.steps)

    @property
    def can_vary(self) -> bool:
        """Whether there is more than one batch or round; a single measurement does not show its own spread."""
        return self.seconds.numel() > 1

    def resampling(self, seed: int = 0) -> Resampling:
        """Draw as many batches and rounds as this sample has."""
        generator = torch.Generator().manual_seed(seed)
        count, (rounds, _) = self.num_batches, self.seconds.shape
        chosen = torch.randint(count, (NUM_DRAWS, count), generator=generator)
        times = torch.zeros(NUM_DRAWS, count).scatter_add_(1, chosen, torch.ones(NUM_DRAWS, count))
        return Resampling(times, torch.randint(rounds, (NUM_DRAWS, rounds), generator=generator))

    def tau(self, drawn: Resampling) -> Tensor:
        """tau in each draw [D]."""
        return (drawn.batches @ self.uncut_tokens) / (drawn.batches @ self.steps).clamp_min(1)

    def rates(self, drawn: Resampling) -> Tensor:
        """Tokens per second in each draw and round [D, R]."""
        seconds = drawn.batches @ self.seconds.T
        return ((drawn.batches @ self.new_tokens)[:, None] / seconds.clamp_min(1e-9)).gather(1, drawn.rounds)

    def speedup(self, other: Sample, drawn: Resampling) -> Tensor:
        """Median over rounds of the ratio of rates within a round, in each draw [D]."""
        ratio = self.rates(drawn) / other.rates(drawn).clamp_min(1e-9)
        return ratio.quantile(0.5, dim=1)


def interval(values: Tensor) -> Interval:
    """The middle 95 % of resampled figures [D]."""
    tail = (1 - COVERAGE) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail])).tolist()
    return low, high
