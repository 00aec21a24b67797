"""Tests whether a sample comes from a distribution: counts of independent draws against their probabilities.

Shapes: V outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Expected draws in a cell; smaller cells are pooled. The usual 5 is for p-values of a few percent. At 1e-6 the
# chi-square law is then too optimistic by a factor of 6 to 20, with 20 by 2 to 4 (simulated, 3 to 40 cells).
MIN_EXPECTED = 20.0


class GoodnessOfFit(NamedTuple):
    """How far counts are from probabilities."""

    draws: int
    total_variation: float
    """Half the sum of |frequency - p|."""
    expected_total_variation: float
    """The mean total variation of a true sample of this size, with each frequency taken as normal."""
    std_of_difference: float
    """Root of the mean square of frequency - p over all outcomes."""
    expected_std: float
    """The same for a true sample of this size: the root of mean(p (1 - p)) / n."""
    chi2: float
    degrees_of_freedom: int
    p_value: float
    """Probability that a true sample looks worse; 0 if an outcome of probability 0 was drawn."""
    impossible: int
    """Draws of outcomes of probability 0."""


def goodness_of_fit(counts: Tensor, p: Tensor) -> GoodnessOfFit:
    """Compare counts [V] with probabilities [V] that sum to 1, by Pearson's chi-square test."""
    counts, p = counts.flatten().double(), p.flatten().double()
    n = float(counts.sum())
    if n == 0:
        return GoodnessOfFit(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 1.0, 0)
    difference, variance = counts / n - p, p * (1 - p) / n
    statistic, degrees = _chi2(counts, n * p)
    impossible = int(counts[p == 0].sum())
    return GoodnessOfFit(
        draws=int(n),
        total_variation=float(difference.abs().sum()) / 2,
        expected_total_variation=float((2 * variance / torch.pi).sqrt().sum()) / 2,
        std_of_difference=float(difference.square().mean().sqrt()),
        expected_std=float(variance.mean().sqrt()),
        chi2=statistic,
        degrees_of_freedom=degrees,
        p_value=_p_value(statistic, degrees, impossible),
        impossible=impossible,
    )


def _chi2(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, with all cells below MIN_EXPECTED pooled into one."""
    large = expected >= MIN_EXPECTED
    seen = torch.cat([observed[large], observed[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    if len(wanted) > 1 and wanted[-1] < MIN_EXPECTED:  # the pool is too small itself: it joins the smallest other cell
        smallest = int(wanted[:-1].argmin())
        seen[smallest] += seen[-1]
        wanted[smallest] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    statistic = float(((seen - wanted).square() / wanted.clamp_min(torch.finfo(wanted.dtype).tiny)).sum())
    return statistic, len(wanted) - 1


def combined(parts: Sequence[GoodnessOfFit]) -> GoodnessOfFit:
    """Independent tests as one: their statistics add up, and distances become means weighted by draws."""
    draws = sum(part.draws for part in parts)
    statistic, degrees = sum(part.chi2 for part in parts), sum(part.degrees_of_freedom for part in parts)
    impossible = sum(part.impossible for part in parts)
    distances = ("total_variation", "expected_total_variation", "std_of_difference", "expected_std")
    means = (sum(part.draws * getattr(part, name) for part in parts) / max(draws, 1) for name in distances)
    variation, expected_variation, std, expected_std = means
    p_value = _p_value(statistic, degrees, impossible)
    return GoodnessOfFit(
        draws, variation, expected_variation, std, expected_std, statistic, degrees, p_value, impossible
    )


def _p_value(statistic: float, degrees: int, impossible: int) -> float:
    if impossible:
        return 0.0
    if not degrees:
        return 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
