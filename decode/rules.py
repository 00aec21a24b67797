"""Acceptance rules: a table of what each of them is, tests and goes with. `decode.accept` applies them to drafts.

A lossless rule accepts what the target decides on. A lossy rule also has a test, `passes`: which tokens it accepts
after a node. Most accept the longest path of tokens that pass; one that `truncates` walks as a lossless rule does, on
a target that is cut down to these tokens. A new rule of these kinds is a row of `RULES` with its test; constants of its
own are also fields of `AcceptanceRule` and `decode.settings.DecodingOptions`. Lossless rules are not asked by name: the
target and the draft tell how they walk (`decode.step.Judge`).

Shapes: V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

from medusa.errors import RequestError, choose_one_of

if TYPE_CHECKING:  # the options of commands list the rules, and need no torch
    from torch import Tensor

EPSILON, DELTA = 0.09, 0.3
"""Default constants of typical acceptance (Medusa paper, section 2.3.1)."""


IMPLAUSIBLE = 2e3
"""How far below the others contrastive decoding scores implausible tokens, whose probability is then 0."""


def typical(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """A mask [..., V] of the typical tokens, whose probability p is above min(epsilon, delta exp(-entropy)).

    The entropy is that of the distribution `p` [..., V] (Medusa paper, section 2.3.1). The most probable token always
    passes; the mask sets it explicitly, because equality or rounding could exclude it at delta 1."""
    import torch

    p = p.double()
    entropy = torch.special.entr(p).sum(-1, keepdim=True)
    threshold = (delta * entropy.neg().exp()).clamp_max(epsilon)
    return (p > threshold).scatter(-1, p.argmax(-1, keepdim=True), True)


def among_best(scores: Tensor, k: int) -> Tensor:
    """A mask [..., V] of the k tokens with the highest scores [..., V] (Stern et al. 2018, section 5.1).

    Tokens that a logits processor or a contrast excludes do not pass."""
    import torch

    best = scores.topk(min(k, scores.shape[-1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & _possible(scores)


def near_best(scores: Tensor, distance: int) -> Tensor:
    """A mask [..., V] of the ids within `distance` of the id with the best score (Stern et al. 2018, section 5.2).

    Neighbouring ids must mean similar values, as for pixels or audio samples. Excluded tokens do not pass."""
    import torch

    ids = torch.arange(scores.shape[-1], device=scores.device)
    return ((ids - scores.argmax(-1, keepdim=True)).abs() <= distance) & _possible(scores)


def _possible(scores: Tensor) -> Tensor:
    """A mask [..., V] of the tokens whose probability is not 0: no processor or contrast has excluded them."""
    return scores > scores.amax(-1, keepdim=True) - IMPLAUSIBLE / 2


class Rule(NamedTuple):
    """What an acceptance rule is, and what it goes with."""

    name: str
    lossless: bool = False  # whether texts are those of the model: its best tokens, or samples of its distribution
    samples: bool = True  # whether it needs a temperature above 0; else it needs temperature 0
    number: tuple[str, int] | None = None  # for rules written `NAME:NUMBER`: the number's letter, and its minimum
    passes: Callable[[Tensor, AcceptanceRule], Tensor] | None = None
    """The test of a lossy rule: the target's scores [..., V] -> which tokens it accepts [..., V]."""
    truncates: bool = False  # whether the tokens that pass are sampled from; else their longest path is accepted
    draws: bool = False  # whether drafts may be samples (`--draft sample`)
    compiles: bool = True  # whether compiled steps can apply it

    @property
    def walks(self) -> bool:
        """Whether it decides on one token after another; else it tests all drafted tokens at once."""
        return self.passes is None or self.truncates

    @property
    def is_typical(self) -> bool:
        """Whether it is typical acceptance, which reads epsilon and delta."""
        return self.passes is _typical

    @property
    def written(self) -> str:
        """The rule as help texts write it."""
        return self.name if self.number is None else f"{self.name}:{self.number[0]}"


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
    def keeps_texts(self) -> bool:
        """Whether a text is the same with any drafts: those of lossy rules and of drawn drafts depend on them."""
        return self.kind.lossless and self.draft == "topk"

    @property
    def name(self) -> str:
        """The acceptance rule as a user writes it, `NAME` or `NAME:NUMBER`."""
        return self.rule if self.limit is None else f"{self.rule}:{self.limit}"

    def passes(self, scores: Tensor) -> Tensor:
        """Which tokens the rule, a lossy one, accepts after the target's scores [..., V]: a mask [..., V]."""
        assert self.kind.passes is not None, f"{self.name} is lossless"
        return self.kind.passes(scores, self)


def _typical(scores: Tensor, rule: AcceptanceRule) -> Tensor:
    return typical(scores.softmax(-1), rule.epsilon, rule.delta)


RULES = {
    rule.name: rule
    for rule in (
        Rule("greedy", lossless=True, samples=False),
        Rule("rejection", lossless=True, draws=True),
        Rule("typical", passes=_typical),
        Rule("typical-sampled", passes=_typical, truncates=True, draws=True),
        Rule(
            "topk",
            samples=False,
            number=("K", 1),
            passes=lambda scores, rule: among_best(scores, cast(int, rule.limit)),
            compiles=False,
        ),
        Rule(
            "distance",
            samples=False,
            number=("D", 0),
            passes=lambda scores, rule: near_best(scores, cast(int, rule.limit)),
            compiles=False,
        ),
    )
}


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
