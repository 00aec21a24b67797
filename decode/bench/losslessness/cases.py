"""The cases of a sampling experiment, which are chi-square tests of sampled tokens, and the verdict on all cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from decode.bench.losslessness.chi2 import DISTANCES, GoodnessOfFit, combined
from decode.drafters.base import DrafterFactory
from medusa.tree import Tree

FALSE_ALARM = 1e-4  # probability that a run of `medusa verify` reports a difference although the decoder is correct
CAUTION = 4.0  # p-values as small as the threshold are at most this many times too frequent (`chi2.MIN_EXPECTED`)
MAX_CHILDREN = 2  # children per node in most drawn trees: each further child multiplies the distributions to compute
SLOW_SHARE = 20  # trees with all children are drawn this many times less often, and so is what compiled code draws


class Rule(NamedTuple):
    """An acceptance rule, its `draft` (`topk`: best guesses; `sample`: sampled), and what it is tested `against`."""

    acceptance: str
    draft: str
    against: str = "target"  # or `truncated target`, which `typical-sampled` samples from
    whole: bool = False  # whether nodes of drawn trees keep all their children, instead of the first `MAX_CHILDREN`

    @property
    def is_judged(self) -> bool:
        """Whether the rule guarantees the distribution that it is tested against, so that a failed test is an error."""
        return self.acceptance == "rejection" or self.against == "truncated target"


RULES = (
    Rule("rejection", "topk"),
    Rule("rejection", "sample"),
    Rule("rejection", "sample", whole=True),
    Rule("typical-sampled", "topk", "truncated target"),
    Rule("typical-sampled", "topk"),
    Rule("typical", "topk"),
)


def rules_for(source: DrafterFactory, compiled: bool = False) -> list[Rule]:
    """List the acceptance rules that can be tested with a drafter. Some need a drafter that can sample its guesses.

    Decoding draws no dynamic trees, compiled steps draw none, and few children make a tree that is whole in any case.
    """
    is_wide = isinstance(source.tree, Tree) and source.tree.clip(2).children.shape[1] > MAX_CHILDREN
    drawn = [rule for rule in RULES if rule.draft == "topk" or (source.can_draw and not compiled)]
    return [rule for rule in drawn if is_wide or not rule.whole]


@dataclass
class Case:
    """Chi-square tests of the first and second token after the root, for one acceptance rule and one prompt."""

    prompt: int
    temperature: float
    top_p: float
    rule: Rule
    first: GoodnessOfFit  # test of the first token after the root
    second: GoodnessOfFit  # test of the second token after the root given the first, on the steps that decided on both
    frequencies: Tensor  # [V] the observed frequencies of the first token after the root
    target: Tensor  # [V] the expected probabilities of the first token after the root
    draft: Tensor | None  # [V] the probabilities of the first head; `None` for a drafter without heads
    mean_accepted: float  # accepted draft tokens per step; the tree has 2 levels, and few children (`Rule.whole`)

    @property
    def joint(self) -> GoodnessOfFit:
        """The tests `first` and `second` combined."""
        return combined([self.first, self.second])

    def tests(self) -> list[tuple[int, GoodnessOfFit]]:
        """List the two tests to report, each with its number of tested tokens: (1, `first`) and (2, `joint`)."""
        return [(1, self.first), (2, self.joint)]

    def to_json(self) -> list[dict[str, object]]:
        """Return the entries of the case in `medusa verify --json`, one per test."""
        about = {"prompt": self.prompt, "temperature": self.temperature, "top_p": self.top_p}
        return [
            {**about, "tokens": tokens, **self.rule._asdict(), "judged": self.rule.is_judged}
            | {name: getattr(found, name) for name in (*DISTANCES, "chi2", "degrees_of_freedom")}
            | {"chi2_p_value": found.p_value, "impossible_draws": found.impossible, "mean_accepted": self.mean_accepted}
            for tokens, found in self.tests()
        ]


def passes(cases: Sequence[Case]) -> bool:
    """Whether every test of a judged rule (`Rule.is_judged`) has a p-value of at least `threshold(cases)`."""
    return all(p_value >= threshold(cases) for p_value in p_values(cases))  # `min` would overlook NaN


def threshold(cases: Sequence[Case]) -> float:
    """Return the smallest p-value that passes: FALSE_ALARM / judged tests (Bonferroni) / CAUTION (a safety factor)."""
    return FALSE_ALARM / CAUTION / max(len(p_values(cases)), 1)


def p_values(cases: Sequence[Case]) -> list[float]:
    """List the p-values of all tests of judged rules (`Rule.is_judged`), whose failure means an error in the code."""
    return [found.p_value for case in cases if case.rule.is_judged for _, found in case.tests()]


def figures_table(cases: list[Case]) -> tuple[list[str], list[list[str]]]:
    """Format the chi-square tests of all cases as a table: the column names, and one row of cells per test."""
    head = ["rule", "draft", "prompt", "T", "top-p", "tokens", "variation", "expected", "std of difference"]
    head += ["expected", "p-value", "verdict", "accepted"]
    smallest, rows = threshold(cases), []
    for case in cases:
        verdicts = ("DIFFERS", "passed") if case.rule.is_judged else ("lossy", "unseen")
        draft = case.rule.draft + (", whole" if case.rule.whole else "")
        rule = [case.rule.acceptance + ("*" if case.rule.against != "target" else ""), draft]
        about = [*rule, str(case.prompt + 1), f"{case.temperature:g}", f"{case.top_p:g}"]
        for tokens, found in case.tests():
            variation = [f"{found.total_variation:.5f}", f"{found.expected_total_variation:.5f}"]
            spread = [f"{found.std_of_difference:.2e}", f"{found.expected_std:.2e}", f"{found.p_value:.2g}"]
            verdict = verdicts[found.p_value >= smallest]
            rows.append([*about, str(tokens), *variation, *spread, verdict, f"{case.mean_accepted:.2f}"])
    return head, rows
