"""The tests of a sampling experiment, and their verdict together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from decode.bench.chi2 import GoodnessOfFit
from decode.drafters.base import DrafterFactory

FALSE_ALARM = 1e-4
"""Probability that the draws of one `medusa verify` fail although nothing is wrong, over all of its tests together and
within the accuracy of the chi-square law (docs/exactness.md)."""
CAUTION = 4.0  # so small a p-value comes at most this many times more often than it says (`MIN_EXPECTED` in chi2.py)


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
    """One prompt, one target and one rule: tests of the first drafted token and of the second token after it.

    Shapes: V vocabulary.
    """

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
