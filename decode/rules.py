"""Acceptance rules: a table of what each of them is and goes with. `decode.accept` has the tests that they make.

A new rule is a row of `RULES`, and its test in `decode.accept.passes_of` if it has one."""

from __future__ import annotations

from typing import NamedTuple

from medusa.errors import RequestError, choose_one_of

EPSILON, DELTA = 0.09, 0.3
"""Default constants of typical acceptance (Medusa paper, section 2.3.1)."""


class Rule(NamedTuple):
    """What an acceptance rule is, and what it goes with."""

    name: str
    lossless: bool = False  # whether texts are those of the model: its best tokens, or samples of its distribution
    samples: bool = True  # whether it needs a temperature above 0; else it needs temperature 0
    number: tuple[str, int] | None = None  # for rules written `NAME:NUMBER`: the number's letter, and its minimum
    walks: bool = True  # whether it decides on one token after another; else it tests all drafted tokens at once
    draws: bool = False  # whether drafts may be samples (`--draft sample`)
    compiles: bool = True  # whether compiled steps can apply it

    @property
    def written(self) -> str:
        """The rule as help texts write it."""
        return self.name if self.number is None else f"{self.name}:{self.number[0]}"


RULES = {
    rule.name: rule
    for rule in (
        Rule("greedy", lossless=True, samples=False),
        Rule("rejection", lossless=True, draws=True),
        Rule("typical", walks=False),
        Rule("typical-sampled", draws=True),
        Rule("topk", samples=False, number=("K", 1), walks=False, compiles=False),
        Rule("distance", samples=False, number=("D", 0), walks=False, compiles=False),
    )
}


class AcceptanceRule(NamedTuple):
    """An acceptance rule, its constants (`limit`: the NUMBER of `NAME:NUMBER`), and its kind of drafts (`draft`)."""

    rule: str
    epsilon: float = EPSILON
    delta: float = DELTA
    draft: str = "topk"  # topk: the drafter's best guesses; sample: draws from its distributions
    limit: int | None = None  # the NUMBER of the rules topk:NUMBER and distance:NUMBER

    @property
    def kind(self) -> Rule:
        """The rule's row of `RULES`."""
        return RULES[self.rule]

    @property
    def name(self) -> str:
        """The acceptance rule as a user writes it, `NAME` or `NAME:NUMBER`."""
        return self.rule if self.limit is None else f"{self.rule}:{self.limit}"


def rule_and_limit(acceptance: str) -> tuple[Rule, int | None]:
    """Read an acceptance rule `NAME` or `NAME:NUMBER`: its row of `RULES`, and its number if it has one.

    Raise a `RequestError` if there is no such rule, or it lacks its number."""
    name, colon, number = acceptance.partition(":")
    rule = RULES.get(name)
    if rule is None or (colon and rule.number is None):
        *most, last = [rule.written for rule in RULES.values() if not rule.lossless]
        advice = choose_one_of(acceptance, [rule.written for rule in RULES.values()])
        raise RequestError(f"acceptance is {acceptance!r}; {advice} ({', '.join(most)} and {last}: lossy)")
    if rule.number is None:
        return rule, None
    least = rule.number[1]
    if not number.isdecimal() or int(number) < least:
        example = f"{name}:{max(least, 2)}"
        raise RequestError(f"acceptance {acceptance!r} needs a whole number of at least {least}, as in {example}")
    return rule, int(number)


def is_lossy(acceptance: str) -> bool:
    """Whether an acceptance rule `NAME` or `NAME:NUMBER` can change the text or the distribution of samples."""
    return not RULES[acceptance.partition(":")[0]].lossless
