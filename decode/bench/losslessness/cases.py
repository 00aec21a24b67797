"""Chi-square tests of sampled tokens, and the cases of a sampling experiment with their common verdict.

Shapes: V outcomes, which are the tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode.drafters.base import DrafterFactory

# Cells with fewer expected draws are pooled. The usual limit of 5 suits p-values of a few percent. In simulations with
# 3 to 40 cells, p-values near 1e-6 were 6 to 20 times too frequent with a limit of 5, and 2 to 4 times with 20.
MIN_EXPECTED = 20.0


class GoodnessOfFit(NamedTuple):
    """The result of a chi-square test of drawn outcomes against their expected probabilities."""

    draws: int
    total_variation: float  # total variation distance: half the sum of |frequency - probability| over all outcomes
    expected_total_variation: float  # mean `total_variation` of as many true draws, by the normal approximation
    std_of_difference: float  # root mean square of frequency - probability over all outcomes
    expected_std: float  # expected `std_of_difference` of n draws from p: the root of mean(p (1 - p)) / n
    chi2: float
    degrees_of_freedom: int
    p_value: float  # probability that true draws deviate at least as much; 0 if `impossible` is above 0
    impossible: int  # number of draws whose outcome has probability 0


DISTANCES = ("total_variation", "expected_total_variation", "std_of_difference", "expected_std")


def goodness_of_fit(counts: Tensor, p: Tensor) -> GoodnessOfFit:
    """Test the counts of drawn outcomes [V] against probabilities p [V], by Pearson's chi-square test."""
    counts, p = counts.flatten().double(), p.flatten().double()
    n = float(counts.sum())
    if n == 0:
        return GoodnessOfFit(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 1.0, 0)
    difference, variance = counts / n - p, p * (1 - p) / n
    distances = {
        "total_variation": float(difference.abs().sum()) / 2,
        "expected_total_variation": float((2 * variance / torch.pi).sqrt().sum()) / 2,
        "std_of_difference": float(difference.square().mean().sqrt()),
        "expected_std": float(variance.mean().sqrt()),
    }
    return _fit(int(n), distances, *_chi2(counts, n * p), impossible=int(counts[p == 0].sum()))


def _chi2(observed: Tensor, expected: Tensor) -> tuple[float, int]:
    """Compute Pearson's statistic and its degrees of freedom. Outcomes expected too rarely are pooled."""
    large = expected >= MIN_EXPECTED
    seen = torch.cat([observed[large], observed[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    if len(wanted) > 1 and wanted[-1] < MIN_EXPECTED:  # the pool is still too small: add it to the smallest cell
        smallest = int(wanted[:-1].argmin())
        seen[smallest] += seen[-1]
        wanted[smallest] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    statistic = float(((seen - wanted).square() / wanted.clamp_min(torch.finfo(wanted.dtype).tiny)).sum())
    return statistic, len(wanted) - 1


def combined(parts: Sequence[GoodnessOfFit]) -> GoodnessOfFit:
    """Combine independent chi-square tests: add the statistics, and average the distances, weighted by draws."""
    draws = sum(part.draws for part in parts)
    means = {name: sum(part.draws * getattr(part, name) for part in parts) / max(draws, 1) for name in DISTANCES}
    statistic, degrees = sum(part.chi2 for part in parts), sum(part.degrees_of_freedom for part in parts)
    return _fit(draws, means, statistic, degrees, sum(part.impossible for part in parts))


def _fit(draws: int, distances: dict[str, float], chi2: float, degrees: int, impossible: int) -> GoodnessOfFit:
    """Make the result of a chi-square test, with its p-value. `distances`: the fields named in `DISTANCES`."""
    p_value = 0.0 if impossible else 1.0
    if degrees and not impossible:
        half = torch.tensor([degrees / 2, chi2 / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(half[0], half[1]))
    return GoodnessOfFit(
        draws=draws, **distances, chi2=chi2, degrees_of_freedom=degrees, p_value=p_value, impossible=impossible
    )


FALSE_ALARM = 1e-4
"""Probability that `medusa verify` reports a difference although the decoder is correct, over all tests of one run."""
CAUTION = 4.0  # p-values as small as the threshold are at most this many times too frequent (`MIN_EXPECTED`)


class Rule(NamedTuple):
    """An acceptance rule and the way that drafts are made for it (`topk` or `sample`), which are tested together."""

    acceptance: str
    draft: str
    against: str = "target"  # or `truncated target`, which `typical-sampled` samples from

    @property
    def is_judged(self) -> bool:
        """Whether samples must follow the distribution named in `against`, so that a failed test is an error."""
        return self.acceptance == "rejection" or self.against == "truncated target"


RULES = (
    Rule("rejection", "topk"),
    Rule("rejection", "sample"),
    Rule("typical-sampled", "topk", "truncated target"),
    Rule("typical-sampled", "topk"),
    Rule("typical", "topk"),
)


def rules_for(source: DrafterFactory) -> list[Rule]:
    """List the rules that can be tested with this drafter. Some rules need a drafter that can sample its guesses."""
    return [rule for rule in RULES if rule.draft == "topk" or source.can_draw]


@dataclass
class Case:
    """Chi-square tests of the first and second token that a draft can hold, for one rule and prompt."""

    prompt: int
    temperature: float
    top_p: float
    rule: Rule
    first: GoodnessOfFit  # test of the first drafted token, which is the token after the root
    second: GoodnessOfFit  # test of the second drafted token given the first, on the steps that decided on both
    frequencies: Tensor  # [V] the observed frequencies of the first drafted token
    target: Tensor  # [V] the expected probabilities of the first drafted token
    draft: Tensor | None  # [V] the probabilities of the first head; `None` for a drafter without heads
    mean_accepted: float  # drafted tokens per step, of the user's tree cut to two levels, and if drawn to two children

    @property
    def joint(self) -> GoodnessOfFit:
        """The tests `first` and `second` combined."""
        return combined([self.first, self.second])

    def tests(self) -> list[tuple[int, GoodnessOfFit]]:
        """List the two tests to report: (1, test of the first drafted token) and (2, test of both drafted tokens)."""
        return [(1, self.first), (2, self.joint)]

    def to_json(self) -> list[dict[str, object]]:
        """Return the entries of the case in `medusa verify --json`, one per test."""
        return [
            {
                "prompt": self.prompt,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tokens": tokens,
                **self.rule._asdict(),
                "judged": self.rule.is_judged,
                **{name: getattr(found, name) for name in (*DISTANCES, "chi2", "degrees_of_freedom")},
                "chi2_p_value": found.p_value,
                "impossible_draws": found.impossible,
                "mean_accepted": self.mean_accepted,
            }
            for tokens, found in self.tests()
        ]


def passes(cases: Sequence[Case]) -> bool:
    """Whether the p-value of every judged test (`Rule.is_judged`) is at least `threshold(cases)`."""
    smallest = threshold(cases)
    return all(value >= smallest for value in p_values(cases))


def threshold(cases: Sequence[Case]) -> float:
    """Smallest p-value that passes: FALSE_ALARM / CAUTION, divided by the number of judged tests (Bonferroni)."""
    return FALSE_ALARM / CAUTION / max(len(p_values(cases)), 1)


def p_values(cases: Sequence[Case]) -> list[float]:
    """List the p-values of all tests that are judged (`Rule.is_judged`)."""
    return [found.p_value for case in cases if case.rule.is_judged for _, found in case.tests()]


def figures_table(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    """Format the tests of all cases as a table: the column names, and one row of cells per test."""
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
