"""Speedup, measured: methods take turns on the same prompts, and only ratios within one run are quoted.

Every round decodes all prompts with every method, one prompt at a time and method after method, so that a machine that
slows down slows all of them. One batch is a warm-up for each. A figure is the median over rounds; tokens per second
count the tokens given, the prefill included, the same way for every method.

An interval holds a figure in 95 % of resamplings: rounds and batches of prompts are drawn anew, with replacement, and
both sides of a ratio keep the same draw, since they decoded the same prompts in the same round. It says how far other
prompts of the kind and other minutes of this machine might move the figure; not what another machine would give.

Shapes: R rounds, P prompts, D draws of a resampling.
"""

from __future__ import annotations

import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from decode.bench.methods import Method
from decode.results import Result, prompt_seeds, tau
from decode.timers import STAGES, StageTimer

DRAWS = 2000
COVERAGE = 0.95
POSITIONS = 16
"""Tokens in a bin of `tau_by_position`."""


@dataclass
class Contender:
    """A method under test."""

    name: str
    method: Method
    clock: StageTimer | None = None
    rounds: list[list[Result]] = field(default_factory=list)
    """Per round one result a prompt, the warm-up left out."""
    batch_of: list[int] = field(default_factory=list)
    """Which batch a prompt was decoded in: the prompts of one share their seconds, so they are resampled together."""

    def tokens_per_second(self, chosen: Sequence[int] | None = None) -> list[float]:
        """Per round: all tokens over all seconds (not a mean of ratios), of the `chosen` prompts."""
        rates = []
        for results in self.rounds:
            picked = results if chosen is None else [results[index] for index in chosen]
            # Prompts of one batch share their seconds.
            rates.append(sum(len(r.new_ids) for r in picked) / max(sum(r.seconds for r in picked), 1e-9))
        return rates


def run_rounds(
    contenders: Sequence[Contender],
    batches: Sequence[Sequence[Sequence[int]]],
    rounds: int,
    on_progress: Callable[[], None] = lambda: None,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> None:
    """Decode `batches` of prompts with every contender, `rounds` times after a warm-up of one batch each.

    A prompt's samples come from one seed, whoever draws them and in whatever batch. `clock`: what tells the seconds,
    for differences; by default results bring theirs, by the clock on the wall.
    """
    for contender in contenders:
        contender.method(batches[0])
        if contender.clock is not None:
            contender.clock.seconds = dict.fromkeys(STAGES, 0.0)
    for number in range(rounds):
        finished: dict[str, list[Result]] = {contender.name: [] for contender in contenders}
        first = 0
        for index, batch in enumerate(batches):
            seeds = prompt_seeds(seed, range(first, first + len(batch)))
            first += len(batch)
            # Whoever goes first may find colder caches, so turns rotate.
            turn = (number + index) % len(contenders)
            for contender in [*contenders[turn:], *contenders[:turn]]:
                start = clock() if clock else 0.0
                results = contender.method(batch, seeds=seeds)
                taken = clock() - start if clock else None
                for result in results:
                    result.seconds = (result.seconds if taken is None else taken) / len(batch)
                finished[contender.name] += results
            on_progress()
        for contender in contenders:
            contender.rounds.append(finished[contender.name])
            contender.batch_of = [index for index, batch in enumerate(batches) for _ in batch]


def summarize(contenders: Sequence[Contender], categories: Sequence[str | None]) -> dict[str, Any]:
    """The `methods` part of the benchmark JSON. `plain` and `transformers` must be among the contenders."""
    by_name = {contender.name: contender for contender in contenders}
    plain, stock = by_name["plain"], by_name["transformers"]
    groups: dict[str, list[int]] = defaultdict(list)
    for index, category in enumerate(categories):
        if category is not None:
            groups[category].append(index)
    return {
        contender.name: _figures(contender, plain, stock)
        | {
            "by_category": {
                category: _figures(contender, plain, stock, chosen)
                for category, chosen in (groups.items() if len(groups) > 1 else ())
            }
        }
        for contender in contenders
    }


def _figures(
    contender: Contender, plain: Contender, stock: Contender, chosen: Sequence[int] | None = None
) -> dict[str, Any]:
    rates = contender.tokens_per_second(chosen)
    indices = range(len(contender.rounds[0])) if chosen is None else chosen
    results = [contender.rounds[0][index] for index in indices]
    pairs = list(zip(contender.rounds, plain.rounds, strict=True))
    equal = [all(mine[index].new_ids == theirs[index].new_ids for mine, theirs in pairs) for index in indices]
    figures: dict[str, Any] = {
        "tokens_per_second": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "tau": tau(results),
        "steps": sum(len(result.step_lengths) for result in results),
        "new_tokens": sum(len(result.new_ids) for result in results),
        "accepted_by_depth": accepted_by_depth(results),
        "speedup": _ratio(rates, plain.tokens_per_second(chosen)),
        "speedup_vs_generate": _ratio(rates, stock.tokens_per_second(chosen)),
        "equal_to_plain": sum(equal) / len(equal),
    }
    mine = Sample.of(prompt_figures(contender, chosen))
    draws = mine.draws()
    figures["tau_interval"] = interval(mine.tau(draws)) if mine.num_batches > 1 else None
    for name, other in (("speedup_interval", plain), ("speedup_vs_generate_interval", stock)):
        theirs = Sample.of(prompt_figures(other, chosen))
        figures[name] = interval(mine.speedup(theirs, draws)) if mine.can_vary else None
    if chosen is None:
        figures["tau_by_position"] = tau_by_position(results)
        figures["prompts"] = prompt_figures(contender)
    if contender.clock is not None and chosen is None:
        total = sum(len(result.step_lengths) for results in contender.rounds for result in results)
        figures["step_ms"] = {
            stage: 1000 * seconds / max(total, 1) for stage, seconds in contender.clock.seconds.items()
        }
    return figures


def prompt_figures(contender: Contender, chosen: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Per prompt: its batch, new tokens, steps, tokens before any cut (tau is their quotient), and seconds a round."""
    indices = range(len(contender.batch_of)) if chosen is None else chosen
    return [
        {
            "batch": contender.batch_of[index],
            "new_tokens": len(contender.rounds[0][index].new_ids),
            "steps": len(contender.rounds[0][index].uncut_lengths),
            "uncut_tokens": sum(contender.rounds[0][index].uncut_lengths),
            "seconds": [round(results[index].seconds, 6) for results in contender.rounds],
        }
        for index in indices
    ]


class Draws(NamedTuple):
    """Resamplings, to be shared by all figures that are compared."""

    batches: Tensor
    """[D, number of batches] how often each is drawn."""
    rounds: Tensor
    """[D, R] which round stands in for each."""


@dataclass
class Sample:
    """What one method did, summed over the prompts of each batch: what is resampled."""

    new_tokens: Tensor  # [batches]
    steps: Tensor
    uncut_tokens: Tensor
    seconds: Tensor  # [R, batches]

    @classmethod
    def of(cls, prompts: Sequence[dict[str, Any]]) -> Sample:
        """From `prompt_figures`, of this run or of the JSON of an earlier one."""
        batches = sorted({prompt["batch"] for prompt in prompts})
        groups = [[prompt for prompt in prompts if prompt["batch"] == batch] for batch in batches]
        new, steps, uncut = (
            torch.tensor([float(sum(prompt[name] for prompt in group)) for group in groups])
            for name in ("new_tokens", "steps", "uncut_tokens")
        )
        seconds = [[sum(times) for times in zip(*(p["seconds"] for p in group), strict=True)] for group in groups]
        return cls(new, steps, uncut, torch.tensor(seconds).T)

    @property
    def num_batches(self) -> int:
        return len(self.steps)

    @property
    def can_vary(self) -> bool:
        """Whether there is more than one of anything: a single measurement says nothing about its own spread."""
        return self.seconds.numel() > 1

    def draws(self, seed: int = 0) -> Draws:
        generator = torch.Generator().manual_seed(seed)
        count, (rounds, _) = self.num_batches, self.seconds.shape
        chosen = torch.randint(count, (DRAWS, count), generator=generator)
        times = torch.zeros(DRAWS, count).scatter_add_(1, chosen, torch.ones(DRAWS, count))
        return Draws(times, torch.randint(rounds, (DRAWS, rounds), generator=generator))

    def tau(self, draws: Draws) -> Tensor:
        """[D]"""
        return (draws.batches @ self.uncut_tokens) / (draws.batches @ self.steps).clamp_min(1)

    def rates(self, draws: Draws) -> Tensor:
        """Tokens per second [D, R]."""
        seconds = draws.batches @ self.seconds.T
        return ((draws.batches @ self.new_tokens)[:, None] / seconds.clamp_min(1e-9)).gather(1, draws.rounds)

    def speedup(self, other: Sample, draws: Draws) -> Tensor:
        """Median over rounds of the ratio within a round, as the figure itself [D]."""
        ratio = self.rates(draws) / other.rates(draws).clamp_min(1e-9)
        return ratio.quantile(0.5, dim=1)


def interval(values: Tensor) -> list[float]:
    """The middle 95 % of resampled figures [D]."""
    tail = (1 - COVERAGE) / 2
    return values.quantile(torch.tensor([tail, 1 - tail])).tolist()


def tau_by_position(results: Sequence[Result]) -> list[dict[str, float]]:
    """tau of the steps whose root stands `start` to `start + POSITIONS` tokens behind the prompt."""
    bins: dict[int, list[int]] = defaultdict(list)
    for result in results:
        at = 0
        for length in result.uncut_lengths:
            bins[at // POSITIONS].append(length)
            at += length
    return [
        {"start": POSITIONS * number, "tau": sum(lengths) / len(lengths), "steps": len(lengths)}
        for number, lengths in sorted(bins.items())
    ]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b if b else 0.0 for a, b in zip(ours, theirs, strict=True))


def accepted_by_depth(results: Sequence[Result]) -> list[float]:
    """Fraction of steps that accepted a node of depth d + 1, for each d that occurs."""
    lengths = [length for result in results for length in result.uncut_lengths]
    deepest = max(lengths, default=1)
    return [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, deepest)]


def accepted_by_node(ranks: Sequence[Tensor], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Fraction of steps that accepted each node, named by its path of ranks; only those that some step accepted.

    `ranks`: per text [P, K], the rank of the token that came in the guesses of each head
    (`decode.bench.calibrate.record`).
    """
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    steps = 0
    for table, result in zip(ranks, results, strict=True):
        at, lines = 0, table.tolist()
        for length in result.uncut_lengths:
            # A last root without a forward, and what a step guessed beyond the text's end, leave no ranks to read.
            if at + length <= len(lines):
                steps += 1
                for depth in range(1, length):
                    counts[tuple(lines[at][:depth])] += 1
            at += length
    return [{"path": list(path), "share": count / steps} for path, count in sorted(counts.items())]


def machine() -> dict[str, Any]:
    """What was measured on: figures mean nothing without it."""
    return {
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX, Arm's BF16); False where it does not say."""
    return any({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()) for line in _cpuinfo("flags", "Features"))


def _processor() -> str:
    names = _cpuinfo("model name")
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


def _cpuinfo(*fields: str) -> list[str]:
    """What Linux says about each core under one of these names."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return []
    return [value.strip() for name, _, value in lines if name.strip() in fields]
