"""Measures speedup: methods take turns on the same prompts, and only ratios within one run are quoted.

Every round decodes all prompts with every method, one batch at a time and method after method, so that a machine that
slows down slows all methods. Each method first decodes one batch as a warm-up. A figure is the median over rounds.
Tokens per second count all new tokens and all of the time, including the prefill, in the same way for every method.

Shapes: P positions, K heads.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from decode.bench.compare import Sample, interval
from decode.bench.figures import AcceptedNode, MethodFigures, PositionFigures, PromptFigures, Rate
from decode.bench.methods import Method
from decode.loop import Timer
from decode.results import Result, prompt_seeds, tau

POSITIONS = 16
"""Tokens in a stretch of `tau_by_position`."""
STAGES = ("propose", "verify", "accept", "compact", "other")


class StageTimer(Timer):
    """Adds up the seconds that each stage of the steps takes."""

    def __init__(self, synchronize: Callable[[], None] = lambda: None) -> None:
        """`synchronize` waits for the device; without it, the work of a GPU counts for a later stage."""
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._synchronize, self._last = synchronize, 0.0

    def start(self) -> None:
        self._synchronize()
        self._last = perf_counter()

    def lap(self, stage: str) -> None:
        before = self._last
        self.start()
        self.seconds[stage] += self._last - before


@dataclass
class Contender:
    """A method in a benchmark, with its results."""

    name: str
    method: Method
    clock: StageTimer | None = None
    rounds: list[list[Result]] = field(default_factory=list)
    """One result per prompt for each round, without the warm-up."""
    batch_of: list[int] = field(default_factory=list)
    """The batch of each prompt. Prompts of one batch share their seconds and are resampled together."""

    def tokens_per_second(self, chosen: Sequence[int] | None = None) -> list[float]:
        """Tokens per second in each round: all tokens of the `chosen` prompts (default: all) over their seconds."""
        rounds = [results if chosen is None else [results[index] for index in chosen] for results in self.rounds]
        return [sum(len(r.new_ids) for r in picked) / max(sum(r.seconds for r in picked), 1e-9) for picked in rounds]

    def prompt_figures(self, chosen: Sequence[int]) -> list[PromptFigures]:
        """Counts and times of each of the `chosen` prompts."""
        found = []
        for index in chosen:
            seconds = [round(results[index].seconds, 6) for results in self.rounds]
            new_ids, lengths = self.rounds[0][index].new_ids, self.rounds[0][index].uncut_lengths
            found.append(PromptFigures(self.batch_of[index], len(new_ids), len(lengths), sum(lengths), seconds))
        return found

    def step_ms(self) -> dict[str, float] | None:
        """Milliseconds of a step by stage, if the method has a clock."""
        if self.clock is None:
            return None
        steps = sum(len(result.step_lengths) for results in self.rounds for result in results)
        return {stage: 1000 * seconds / max(steps, 1) for stage, seconds in self.clock.seconds.items()}


def run_rounds(
    contenders: Sequence[Contender],
    batches: Sequence[Sequence[Sequence[int]]],
    rounds: int,
    on_progress: Callable[[], object] = lambda: None,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> None:
    """Decode `batches` of prompts with every contender, `rounds` times after a warm-up of one batch each.

    Every contender samples a prompt with the same seed, whatever the batch.

    Args:
        on_progress: called after each batch.
        clock: reads seconds, of which differences are taken; by default each result has its own wall-clock time.
    """
    for contender in contenders:
        contender.method(batches[0])
        contender.batch_of = [index for index, batch in enumerate(batches) for _ in batch]
        if contender.clock is not None:
            contender.clock.seconds = dict.fromkeys(STAGES, 0.0)
    seeds = prompt_seeds(seed, range(sum(map(len, batches))))
    for number in range(rounds):
        finished: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
        first = 0
        for index, batch in enumerate(batches):
            turn = (number + index) % len(contenders)  # the first method may find colder caches, so turns rotate
            for contender in [*contenders[turn:], *contenders[:turn]]:
                start = clock() if clock else 0.0
                results = contender.method(batch, seeds=seeds[first : first + len(batch)])
                taken = clock() - start if clock else None
                for result in results:
                    result.seconds = (result.seconds if taken is None else taken) / len(batch)
                finished[contender.name] += results
            first += len(batch)
            on_progress()
        for contender in contenders:
            contender.rounds.append(finished[contender.name])


def summarize(contenders: Sequence[Contender], categories: Sequence[str | None]) -> dict[str, MethodFigures]:
    """The figures of all contenders by name; `plain` and `transformers` must be among them.

    `categories`: one for each prompt. There are figures by category if the prompts have more than one."""
    by_name = {contender.name: contender for contender in contenders}
    baselines = by_name["plain"], by_name["transformers"]
    groups: dict[str, list[int]] = defaultdict(list)
    for index, category in enumerate(categories):
        if category is not None:
            groups[category].append(index)
    if len(groups) == 1:
        groups.clear()
    found = {}
    for contender in contenders:
        everything = range(len(contender.batch_of))
        figures = found[contender.name] = _figures(contender, *baselines, everything)
        figures.tau_by_position = tau_by_position(contender.rounds[0])
        figures.prompts = contender.prompt_figures(everything)
        figures.step_ms = contender.step_ms()
        figures.by_category = {name: _figures(contender, *baselines, chosen) for name, chosen in groups.items()}
    return found


def _figures(contender: Contender, plain: Contender, stock: Contender, chosen: Sequence[int]) -> MethodFigures:
    """The figures of a contender for the `chosen` prompts, against plain decoding and `model.generate`."""
    rates = contender.tokens_per_second(chosen)
    results = [contender.rounds[0][index] for index in chosen]
    pairs = list(zip(contender.rounds, plain.rounds, strict=True))
    equal = [all(mine[index].new_ids == theirs[index].new_ids for mine, theirs in pairs) for index in chosen]
    sample = Sample.of(contender.prompt_figures(chosen))
    drawn = sample.resampling()
    speedups, intervals = [], []
    for other in (plain, stock):
        ratios = [a / b if b else 0.0 for a, b in zip(rates, other.tokens_per_second(chosen), strict=True)]
        speedups.append(statistics.median(ratios))
        resampled = sample.speedup(Sample.of(other.prompt_figures(chosen)), drawn)
        intervals.append(interval(resampled) if sample.can_vary else None)
    return MethodFigures(
        tokens_per_second=Rate(statistics.median(rates), min(rates), max(rates)),
        tau=tau(results),
        steps=sum(len(result.step_lengths) for result in results),
        new_tokens=sum(len(result.new_ids) for result in results),
        accepted_by_depth=accepted_by_depth(results),
        speedup=speedups[0],
        speedup_vs_generate=speedups[1],
        equal_to_plain=sum(equal) / len(equal),
        tau_interval=interval(sample.tau(drawn)) if sample.num_batches > 1 else None,
        speedup_interval=intervals[0],
        speedup_vs_generate_interval=intervals[1],
    )


def accepted_by_depth(results: Sequence[Result]) -> list[float]:
    """Fraction of steps that accepted a node of depth d + 1, for each depth that was reached."""
    lengths = [length for result in results for length in result.uncut_lengths]
    deepest = max(lengths, default=1)
    return [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, deepest)]


def tau_by_position(results: Sequence[Result]) -> list[PositionFigures]:
    """tau of the steps whose root is `start` to `start + POSITIONS` tokens after the prompt."""
    stretches: dict[int, list[int]] = defaultdict(list)
    for result in results:
        at = 0
        for length in result.uncut_lengths:
            stretches[at // POSITIONS].append(length)
            at += length
    return [
        PositionFigures(POSITIONS * number, sum(lengths) / len(lengths), len(lengths))
        for number, lengths in sorted(stretches.items())
    ]


def accepted_by_node(ranks: Sequence[Tensor], results: Sequence[Result]) -> list[AcceptedNode]:
    """Fraction of steps that accepted each node, for the nodes that some step accepted.

    `ranks`: for each text [P, K], the rank of the correct token among the guesses of each head
    (`decode.bench.calibration.recording.record`).
    """
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    steps = 0
    for table, result in zip(ranks, results, strict=True):
        at, lines = 0, table.tolist()
        for length in result.uncut_lengths:
            if at + length <= len(lines):  # a last root needs no forward, and guesses beyond the end have no ranks
                steps += 1
                for depth in range(1, length):
                    counts[tuple(lines[at][:depth])] += 1
            at += length
    return [AcceptedNode(list(path), count / steps) for path, count in sorted(counts.items())]
