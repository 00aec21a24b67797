"""Speedup, measured: methods take turns on the same prompts, and only ratios within one run are quoted.

Every round decodes all prompts with every method, one prompt at a time and method after method, so that a machine that
slows down slows all of them. One batch is a warm-up for each. A figure is the median over rounds; tokens per second
count the tokens given, the prefill included, the same way for every method.
"""

from __future__ import annotations

import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from decode.clock import STAGES, StageClock
from decode.results import Method, Result, prompt_seeds, tau


@dataclass
class Contender:
    """A method under test."""

    name: str
    method: Method
    clock: StageClock | None = None
    rounds: list[list[Result]] = field(default_factory=list)
    """Per round one result a prompt, the warm-up left out."""

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
) -> None:
    """Decode `batches` of prompts with every contender, `rounds` times after a warm-up of one batch each.

    A prompt's samples come from one seed, whoever draws them and in whatever batch."""
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
                results = contender.method(batch, seeds=seeds)
                for result in results:
                    result.seconds /= len(batch)
                finished[contender.name] += results
            on_progress()
        for contender in contenders:
            contender.rounds.append(finished[contender.name])


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
    if contender.clock is not None and chosen is None:
        total = sum(len(result.step_lengths) for results in contender.rounds for result in results)
        figures["step_ms"] = {
            stage: 1000 * seconds / max(total, 1) for stage, seconds in contender.clock.seconds.items()
        }
    return figures


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    return statistics.median(a / b if b else 0.0 for a, b in zip(ours, theirs, strict=True))


def accepted_by_depth(results: Sequence[Result]) -> list[float]:
    """Fraction of steps that accepted a node of depth d + 1, for each d that occurs."""
    lengths = [length for result in results for length in result.uncut_lengths]
    deepest = max(lengths, default=1)
    return [sum(length > depth for length in lengths) / len(lengths) for depth in range(1, deepest)]


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
