"""The headline of a benchmark: the measured gain over plain decoding in a few sentences, or that there is none.

A headline compares with plain decoding in our own loop first, because both sides of that ratio run the same code. It
compares with `model.generate` second. A speedup whose 95 % interval contains 1 is no gain, and no interval is shown for
fewer batches of prompts or rounds than it needs: resampling few of them gives intervals that are too narrow."""

from __future__ import annotations

from dataclasses import dataclass

Interval = tuple[float, float]  # bounds of 95 % of the resampled values of a metric (`decode.bench.compare`)
CONFIDENCE = 0.95  # of all intervals
PERCENT = f"{CONFIDENCE * 100:g} %"
MIN_BATCHES, MIN_ROUNDS = 8, 2  # of an interval: batches of prompts, and rounds in which each is decoded
FASTER, SLOWER, NO_GAIN, NOT_MEASURED = "faster", "slower", "no measurable gain", "not measured"


@dataclass(frozen=True)
class Headline:
    """What a benchmark showed, in words."""

    verdict: str  # `faster`, `slower` or `no measurable gain`, against plain decoding; or `not measured`
    title: str  # one line, with a speedup only if the verdict is `faster`
    text: str  # sentences with intervals, tau, equal texts, model, hardware and prompts; or the reason for no headline
    confidence: float = CONFIDENCE  # of the intervals in the text

    @property
    def claim(self) -> str:
        """The first sentence of the text, which pages and terminals emphasise."""
        return self.text.partition(". ")[0].removesuffix(".") + "."

    @property
    def details(self) -> str:
        """The text after its first sentence."""
        return self.text.partition(". ")[2]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The figures of a benchmark that its headline is made of."""

    subject: str  # the backbone and the drafter: `org/model with the heads org/heads`
    conditions: str  # hardware, prompts and decoding options
    texts: str  # how many texts equal those of plain decoding and of `model.generate`, as a sentence
    batches: int  # number of batches of prompts
    rounds: int
    steps: int  # decoding steps with the drafter in one round
    nodes: int | None  # of the draft tree, the root included; `None` if the drafter has no fixed size
    tau: float
    speedup: float  # over plain decoding
    interval: Interval | None
    speedup_vs_generate: float
    interval_vs_generate: Interval | None


def headline(found: Evidence) -> Headline:
    """Make the headline of a benchmark from its figures.

    The verdict is `not measured` if there were no steps, or too few batches of prompts or rounds for an interval. It is
    `no measurable gain` if nothing was drafted or accepted, or if the interval over plain decoding contains 1."""
    if reason := _not_measured(found):
        return Headline(NOT_MEASURED, "No speedup measured", f"No headline: {reason}")
    verdict = _verdict(found.interval)
    if idle := _idle(found):
        verdict, claim = NO_GAIN, f"No measurable gain over plain decoding: {idle}."
    elif verdict == NO_GAIN:
        claim = (
            f"No measurable gain over plain decoding: the {PERCENT} interval of the speedup, "
            f"{interval_in_words(found.interval)}, contains 1."
        )
    else:
        claim = " ".join(
            (
                _sentence("Decoding with the drafter", "plain decoding", found.speedup, found.interval),
                _sentence("It", "model.generate", found.speedup_vs_generate, found.interval_vs_generate),
            )
        )
    tau = f"tau, the mean number of tokens per step, is {found.tau:.2f}."
    text = " ".join((claim, tau, found.texts, f"Measured: {found.subject}, {found.conditions}."))
    return Headline(verdict, _title(verdict, found.speedup), text)


def _not_measured(found: Evidence) -> str:
    """Return why the figures allow no headline, and what to change; empty if they allow one."""
    if not found.steps:
        return (
            "no decoding step was measured, because every text ended at once. Give prompts that the model continues, "
            "or --ignore-eos."
        )
    needs = []
    if found.batches < MIN_BATCHES:
        needs.append(f"{MIN_BATCHES} batches of prompts, and there were {found.batches}: give more prompts")
    if found.rounds < MIN_ROUNDS:
        needs.append(f"{MIN_ROUNDS} rounds, and there were {found.rounds}: give more rounds (--rounds)")
    if needs:
        return f"an interval needs at least {'; and at least '.join(needs)}."
    if found.interval is None:
        return "these figures have no intervals, because an earlier version measured them. Run the benchmark again."
    return ""


def _idle(found: Evidence) -> str:
    """Return why the drafter cannot have had an effect; empty if it can."""
    if found.nodes == 1:
        return "the tree has one node, the root, so nothing was drafted"
    return "no drafted token was accepted" if found.tau <= 1 else ""


def _verdict(interval: Interval | None) -> str:
    if interval is None or interval[0] <= 1 <= interval[1]:
        return NO_GAIN
    return FASTER if interval[0] > 1 else SLOWER


def _sentence(subject: str, baseline: str, ratio: float, interval: Interval | None) -> str:
    """Describe a speedup over a baseline in one sentence that begins with `subject`."""
    verdict, span = _verdict(interval), f"({PERCENT} interval {interval_in_words(interval)})"
    if verdict == FASTER:
        return f"{subject} is {ratio:.2f} times as fast as {baseline} {span}."
    if verdict == SLOWER:
        return f"{subject} is slower than {baseline}: {ratio:.2f} times as fast {span}."
    return f"{subject} is not measurably faster than {baseline} {span}."


def _title(verdict: str, speedup: float) -> str:
    if verdict == FASTER:
        return f"{speedup:.2f} times as fast as plain decoding"
    return "Slower than plain decoding" if verdict == SLOWER else "No measurable gain over plain decoding"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, such as `1 round` or `2 rounds`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def interval_in_words(interval: Interval | None) -> str:
    """Format an interval for tables and sentences, such as `1.20 to 1.35`. `None` becomes an empty string."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
