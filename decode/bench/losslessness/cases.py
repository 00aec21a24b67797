"""What is tested by sampling, and how the tests are judged together."""

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
CAUTION = 4.0  # so small a p-value comes at most this much more often than it says (`decode.bench.chi2.MIN_EXPECTED`)


class Rule(NamedTuple):
    """A way to draft and to accept."""

    acceptance: str
    draft: str
    against: str = "target"
    """`target`, or `truncated target`: the distribution that samples of `typical-sampled` follow."""

    @property
    def is_judged(self) -> bool:
        """Whether the rule claims to draw from what it is compared with. The others are only expected to differ."""
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
    """One prompt, one target and one rule: tests of the first drafted token and of the second after it.

    Shapes: V vocabulary.
    """

    prompt: int
    temperature: float
    top_p: float
    rule: Rule
    first: GoodnessOfFit
    """Of the first drafted token, the one after the root."""
    second: GoodnessOfFit
    """Of the token after that, given the first, in the steps that decided on both."""
    joint: GoodnessOfFit
    """Both together."""
    frequencies: Tensor
    """[V] of the first drafted token."""
    target: Tensor
    """[V] the probabilities that they are compared with."""
    draft: Tensor | None
    """[V] the distribution of the first head, if heads draft."""
    mean_accepted: float
    """Drafted tokens accepted a step, from this context. The tree is that of the user, cut to two levels, and for
    drawn drafts to two children a node."""

    def tests(self) -> Iterator[tuple[int, GoodnessOfFit]]:
        """The tests with the number of tokens that each is about."""
        yield from ((1, self.first), (2, self.joint))

    def to_json(self) -> list[dict[str, object]]:
        """The lines of the case in `medusa verify --json`, one for each test."""
        return [
            {
                "prompt": self.prompt,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "tokens": tokens,
                "draft": self.rule.draft,
                "acceptance": self.rule.acceptance,
                "against": self.rule.against,
                "judged": self.rule.is_judged,
                "total_variation": found.total_variation,
                "expected_total_variation": found.expected_total_variation,
                "std_of_difference": found.std_of_difference,
                "expected_std": found.expected_std,
                "chi2": found.chi2,
                "degrees_of_freedom": found.degrees_of_freedom,
                "chi2_p_value": found.p_value,
                "impossible_draws": found.impossible,
                "mean_accepted": self.mean_accepted,
            }
            for tokens, found in self.tests()
        ]


def passes(cases: Sequence[Case]) -> bool:
    """Whether no judged test is below its share of the family-wise false-alarm rate."""
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
    least, rows = threshold(cases), []
    for case in cases:
        verdicts = ("DIFFERS", "passed") if case.rule.is_judged else ("lossy", "unseen")
        rule = case.rule.acceptance + ("*" if case.rule.against != "target" else "")
        about = [rule, case.rule.draft, str(case.prompt + 1), f"{case.temperature:g}", f"{case.top_p:g}"]
        for tokens, found in case.tests():
            rows.append(
                [
                    *about,
                    str(tokens),
                    *(f"{found.total_variation:.5f}", f"{found.expected_total_variation:.5f}"),
                    *(f"{found.std_of_difference:.2e}", f"{found.expected_std:.2e}", f"{found.p_value:.2g}"),
                    verdicts[found.p_value >= least],
                    f"{case.mean_accepted:.2f}",
                ]
            )
    return head, rows
