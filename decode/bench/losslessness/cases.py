"""Chi-square tests of samples, the cases of a sampling experiment, and their verdict together.

Shapes: V outcomes (tokens of the vocabulary).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode.drafters.base import DrafterFactory

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


FALSE_ALARM = 1e-4
"""Probability that the draws of one `medusa verify` fail although nothing is wrong, over all of its tests together and
within the accuracy of the chi-square law (docs/exactness.md)."""
CAUTION = 4.0  # so small a p-value comes at most this many times more often than it says (`MIN_EXPECTED`)


class Rule(NamedTuple):
    """A way to draft and to accept."""

    acceptance: str
    draft: str
    against: str = "target"
    """`target`, or `truncated target`: the distribution that samples of `typical-sampled` follow."""

    @property
    def is_judged(self) -> bool:
        """Whether samples must follow the distribution `against`. The other rules are lossy and expected to differ."""
        return self.acceptance == "rejection" or self.against == "truncated target"


RULES = (
    Rule("rejection", "topk"),
    Rule("rejection", "sample"),
    Rule("typical-sampled", "topk", "truncated target"),
    Rule("typical-sampled", "topk"),
    Rule("typical", "topk"),
)


def rules_for(source: DrafterFactory) -> list[Rule]:
    """The rules that can use this drafter."""
    return [rule for rule in RULES if rule.draft == "topk" or source.can_draw]


@dataclass
class Case:
    """One prompt, one target and one rule: tests of the first drafted token and of the second token after it."""

    prompt: int
    temperature: float
    top_p: float
    rule: Rule
    first: GoodnessOfFit
    """Of the first drafted token, the one after the root."""
    second: GoodnessOfFit
    """Of the second token given the first, in the steps that decided on both."""
    joint: GoodnessOfFit
    """Of both tokens together."""
    frequencies: Tensor
    """[V] of the first drafted token."""
    target: Tensor
    """[V] the probabilities that the frequencies are compared with."""
    draft: Tensor | None
    """[V] the distribution of the first head, if heads draft."""
    mean_accepted: float
    """Drafted tokens accepted per step from this context, with the user's tree cut to two levels, and to two children
    per node for drawn drafts."""

    def tests(self) -> Iterator[tuple[int, GoodnessOfFit]]:
        """The tests, each with the number of tokens that it covers."""
        yield from ((1, self.first), (2, self.joint))

    def to_json(self) -> list[dict[str, object]]:
        """The entries of the case in `medusa verify --json`, one for each test."""
        distances = ("total_variation", "expected_total_variation", "std_of_difference", "expected_std")
        return [
            {
                "prompt": self.prompt,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tokens": tokens,
                **self.rule._asdict(),
                "judged": self.rule.is_judged,
                **{name: getattr(found, name) for name in (*distances, "chi2", "degrees_of_freedom")},
                "chi2_p_value": found.p_value,
                "impossible_draws": found.impossible,
                "mean_accepted": self.mean_accepted,
            }
            for tokens, found in self.tests()
        ]


def passes(cases: Sequence[Case]) -> bool:
    """Whether every judged test has at least the p-value `threshold`."""
    return all(value >= threshold(cases) for value in p_values(cases))


def threshold(cases: Sequence[Case]) -> float:
    """The smallest p-value that passes: FALSE_ALARM shared evenly among the tests (Bonferroni), with CAUTION."""
    return FALSE_ALARM / CAUTION / max(len(p_values(cases)), 1)


def p_values(cases: Sequence[Case]) -> list[float]:
    """The p-values of all judged tests."""
    return [found.p_value for case in cases if case.rule.is_judged for _, found in case.tests()]


def figures_table(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    """The column names and the rows of all tests."""
    head = ["rule", "draft", "prompt", "T", "top-p", "tokens", "variation", "expected", "std of difference"]
    head += ["expected", "p-value", "verdict", "accepted"]
    smallest, rows = threshold(cases), []
    for case in cases:
        verdicts = ("DIFFERS", "passed") if case.rule.is_judged else ("lossy", "unseen")
        rule = case.rule.acceptance + ("*" if case.rule.against != "target" else "")
        about = [rule, case.rule.draft, str(case.prompt + 1), f"{case.temperature:g}", f"{case.top_p:g}"]
        for tokens, found in case.tests():
            variation = [f"{found.total_variation:.5f}", f"{found.expected_total_variation:.5f}"]
            spread = [f"{found.std_of_difference:.2e}", f"{found.expected_std:.2e}", f"{found.p_value:.2g}"]
            verdict = verdicts[found.p_value >= smallest]
            rows.append([*about, str(tokens), *variation, *spread, verdict, f"{case.mean_accepted:.2f}"])
    return head, rows
