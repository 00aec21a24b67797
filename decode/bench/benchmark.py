"""Measures the speedup of decoding methods, which take turns on the same prompts within one run.

In each round, every method decodes all prompts. The methods alternate after every batch of prompts, so a machine that
slows down during the run slows all methods. Each method first decodes some batches as a warm-up, which does not count.
Metrics are medians over the rounds. Tokens per second count all new tokens and the whole time, prefill included."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TypeGuard

import torch
from torch import Tensor

from decode.bench.compare import Sample, interval
from decode.bench.figures import AcceptedNode, MethodFigures, PositionFigures, PromptFigures, Rate
from decode.bench.machine import Moment
from decode.bench.methods import Method
from decode.cache import BLOCK
from decode.compiled.graphs import possible
from decode.loop import Timer
from decode.texts import Result, TextGenerator, mean_tau, prompt_seeds, tau
from medusa.heads.guesses import MISSED

POSITIONS = 16  # tokens in each stretch of text of `tau_by_position`
STAGES = ("propose", "verify", "accept", "compact", "other")


class StageTimer(Timer):
    """Timer of a decoding loop: adds up the seconds that its steps spend in each stage (`STAGES`).

    The timer never waits for a GPU during a step, because such waits would slow down the steps that it measures."""

    def __init__(self, device: torch.device | None = None) -> None:
        """Make a timer of steps on `device`, by default the CPU."""
        self._device = device or torch.device("cpu")
        self.seconds = dict.fromkeys(STAGES, 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each stage so far. Reading them waits until the GPU has finished these steps."""
        for stage, start, end in self._laps:
            self._seconds[stage] += end.seconds_since(start)
        self._laps.clear()
        return self._seconds

    @seconds.setter
    def seconds(self, seconds: dict[str, float]) -> None:
        self._seconds, self._laps = seconds, list[tuple[str, Moment, Moment]]()

    def start(self) -> None:
        if self._laps and self._laps[-1][-1].is_past:
            _ = self.seconds  # reads the laps of earlier steps, so that they do not add up
        self._last = Moment(self._device)

    def lap(self, stage: str) -> None:
        before, self._last = self._last, Moment(self._device)
        self._laps.append((stage, before, self._last))


@dataclass
class Contender:
    """A decoding method that takes part in a benchmark, with its results."""

    name: str
    method: Method
    clock: StageTimer | None = None
    rounds: list[list[Result]] = field(default_factory=list)  # for each round except the warm-up, one result per prompt
    batch_of: list[int] = field(default_factory=list)  # index of each prompt's batch, whose prompts share its time

    @property
    def clocked_steps(self) -> int:
        """The number of steps in all rounds. The texts of a batch take their steps together."""
        longest: dict[tuple[int, int], int] = {}
        for number, results in enumerate(self.rounds):
            for batch, result in zip(self.batch_of, results, strict=True):
                longest[number, batch] = max(longest.get((number, batch), 0), len(result.step_lengths))
        return sum(longest.values())

    def tokens_per_second(self, chosen: Sequence[int]) -> list[float]:
        """Compute tokens per second in each round: new tokens of the prompts `chosen` (indices), divided by time."""
        rounds = [[results[index] for index in chosen] for results in self.rounds]
        return [sum(len(r.new_ids) for r in picked) / max(sum(r.seconds for r in picked), 1e-9) for picked in rounds]

    def prompt_figures(self, chosen: Sequence[int]) -> list[PromptFigures]:
        """Return token counts, step counts and times of each prompt in `chosen` (indices)."""
        found = []
        for index in chosen:
            seconds = [round(results[index].seconds, 6) for results in self.rounds]
            new_ids, lengths = self.rounds[0][index].new_ids, self.rounds[0][index].uncut_lengths
            found.append(PromptFigures(self.batch_of[index], len(new_ids), len(lengths), sum(lengths), seconds))
        return found


def run_rounds(
    contenders: Sequence[Contender],
    batches: Sequence[Sequence[Sequence[int]]],
    rounds: int,
    on_progress: Callable[[], object] = lambda: None,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> None:
    """Decode all batches of prompts `rounds` times with every contender, and store the results in the contenders.

    A prompt gets the same random seed with every contender, whatever the batch size. `on_progress` is called after each
    batch. `clock` returns the time in seconds. If it is `None`, results keep the time that their method measured."""
    for contender in contenders:
        warm_up = warm_up_batches(batches, everything=captures_graphs(contender.method))
        for batch in warm_up:
            contender.method(batch)
        if captures_graphs(contender.method):
            for batch in 2 * warm_up:  # a graph that reads prompts is captured when a third text needs it
                list(islice(contender.method.start(batch), 1))
        contender.batch_of = [index for index, batch in enumerate(batches) for _ in batch]
        if contender.clock is not None:
            contender.clock.seconds = dict.fromkeys(STAGES, 0.0)
    seeds = prompt_seeds(seed, range(sum(map(len, batches))))
    for number in range(rounds):
        for contender in contenders:
            contender.rounds.append([])
        first = 0
        for index, batch in enumerate(batches):
            turn = (number + index) % len(contenders)  # the first method may find colder caches, so turns rotate
            for contender in [*contenders[turn:], *contenders[:turn]]:
                start = clock() if clock else 0.0
                results = contender.method(batch, seeds=seeds[first : first + len(batch)])
                taken = clock() - start if clock else None
                for result in results:
                    result.seconds = (result.seconds if taken is None else taken) / len(batch)
                contender.rounds[-1] += results
            first += len(batch)
            on_progress()


def captures_graphs(method: Method) -> TypeGuard[TextGenerator]:
    """Whether the steps of a method become CUDA graphs, each of which is captured when a text first needs it."""
    if not isinstance(method, TextGenerator) or not method.settings.compile:
        return False
    return method.settings.cuda_graphs != "off" and possible(method.model.device)


def warm_up_batches(
    batches: Sequence[Sequence[Sequence[int]]], everything: bool = False
) -> list[Sequence[Sequence[int]]]:
    """Choose the batches of a warm-up, after which compiled methods have nothing left to prepare while time counts.

    Each batch size is another compiled step. So the batches of one size are chosen by their longest prompt: the
    longest, the shortest, and between them one for each `BLOCK`. The longest comes first, because compiled steps drop
    their CUDA graphs when their caches grow. With `everything`, all batches are chosen: each `BLOCK` tokens of text are
    another CUDA graph, and only decoding shows how long a text gets."""

    def longest(batch: Sequence[Sequence[int]]) -> int:
        return max(map(len, batch))

    chosen: list[Sequence[Sequence[int]]] = []
    for _, same_size in groupby(sorted(batches, key=lambda batch: (-len(batch), -longest(batch))), key=len):
        first, *others = same_size
        chosen.append(first)
        for batch in others:
            shorter = longest(chosen[-1]) - longest(batch)
            if everything or shorter >= BLOCK or (shorter and batch is others[-1]):
                chosen.append(batch)
    return chosen


def summarize(contenders: Sequence[Contender], categories: Sequence[str | None]) -> dict[str, MethodFigures]:
    """Compute the metrics of all contenders, by name. Two contenders must be named `plain` and `transformers`.

    `categories`: each prompt's category, or `None`. Two or more different categories each get their own metrics."""
    by_name = {contender.name: contender for contender in contenders}
    baselines = by_name["plain"], by_name["transformers"]
    names = dict.fromkeys(category for category in categories if category is not None)
    if len(names) == 1:
        names.clear()
    groups = {name: [i for i, category in enumerate(categories) if category == name] for name in names}
    found, everything = {}, range(len(categories))
    for contender in contenders:
        figures = found[contender.name] = _figures(contender, *baselines, everything)
        figures.tau_by_position = tau_by_position(contender.rounds[0])
        figures.prompts = contender.prompt_figures(everything)
        if contender.clock is not None:
            steps = max(contender.clocked_steps, 1)
            figures.step_ms = {stage: 1000 * s / steps for stage, s in contender.clock.seconds.items()}
        figures.by_category = {name: _figures(contender, *baselines, chosen) for name, chosen in groups.items()}
    return found


def _figures(contender: Contender, plain: Contender, stock: Contender, chosen: Sequence[int]) -> MethodFigures:
    """Compute a contender's metrics on the prompts with indices `chosen`. `plain`, `stock`: baselines of speedups."""
    rates = contender.tokens_per_second(chosen)
    results = [contender.rounds[0][index] for index in chosen]
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
        equal_to_plain=_equal(contender, plain, chosen),
        equal_to_generate=_equal(contender, stock, chosen),
        tau_interval=interval(sample.tau(drawn)) if sample.num_batches > 1 else None,
        mean_tau=mean_tau(results),
        mean_tau_interval=interval(sample.mean_tau(drawn)) if sample.num_batches > 1 else None,
        speedup_interval=intervals[0],
        speedup_vs_generate_interval=intervals[1],
    )


def _equal(contender: Contender, other: Contender, chosen: Sequence[int]) -> float:
    """Compute the fraction (0 to 1) of the prompts `chosen` whose texts by two contenders are equal in every round."""
    pairs = list(zip(contender.rounds, other.rounds, strict=True))
    equal = [all(mine[index].new_ids == theirs[index].new_ids for mine, theirs in pairs) for index in chosen]
    return sum(equal) / len(equal)


def accepted_by_depth(results: Sequence[Result]) -> list[float]:
    """Compute the fraction (0 to 1) of steps that accepted a node at depth 1, at depth 2, ... down to the deepest."""
    lengths = [length for result in results for length in result.uncut_lengths]
    return [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, max(lengths, default=1))]


def tau_by_position(results: Sequence[Result]) -> list[PositionFigures]:
    """Compute tau (mean tokens per step) for the steps that start in each stretch of `POSITIONS` new tokens."""
    stretches: dict[int, list[int]] = defaultdict(list)
    for result in results:
        at = 0
        for length in result.uncut_lengths:
            stretches[at - at % POSITIONS].append(length)
            at += length
    return [PositionFigures(start, sum(found) / len(found), len(found)) for start, found in sorted(stretches.items())]


def accepted_by_node(ranks: Sequence[Tensor], results: Sequence[Result]) -> list[AcceptedNode]:
    """Compute, for each node that was accepted, the fraction (0 to 1) of the recorded steps of `results` that did so.

    `ranks`: for each result, the ranks [P, K] (0: best) of the correct tokens among K heads' guesses at P positions.
    Nodes with a rank `MISSED` on their path are left out: heads' guesses are recorded to a limited rank only. So are
    those deeper than K, which other drafters add to a mix."""
    counts: Counter[tuple[int, ...]] = Counter()
    steps = 0
    for table, result in zip(ranks, results, strict=True):
        at, lines = 0, table.tolist()
        for length in result.uncut_lengths:
            if at + length <= len(lines):  # guesses past the end of the text have no ranks
                steps += 1
                paths = (tuple(lines[at][:depth]) for depth in range(1, min(length, table.shape[1] + 1)))
                counts.update(path for path in paths if MISSED not in path)
            at += length
    return [AcceptedNode(list(path), count / steps) for path, count in sorted(counts.items())]
