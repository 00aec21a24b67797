"""Intervals of figures by resampling (a bootstrap), and the comparison of two benchmarks of the same prompts.

Rounds and batches of prompts are drawn repeatedly, with replacement, and 95 % of the resampled figures lie in the
interval. Both sides of a ratio keep the same draw, because they decoded the same prompts in the same rounds. So an
interval shows how far the figure may move with other prompts of the same kind, or at another time on this machine.

Speedups are ratios within a run, so they may be compared between machines; tokens per second may not. Two runs are
compared with the same draw of prompts, so differences between prompts do not count as noise.

Shapes: R rounds, D draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode.bench.figures import BenchmarkResult, Interval, MethodFigures, PromptFigures
from medusa.errors import RequestError

NUM_DRAWS = 2000
COVERAGE = 0.95


class Resampling(NamedTuple):
    """Draws of batches and rounds, shared by all figures that are compared."""

    batches: Tensor
    """[D, number of batches] how often each batch is drawn."""
    rounds: Tensor
    """[D, R] the round that is drawn instead of each round."""


@dataclass
class Sample:
    """The counts and times of one method, summed over the prompts of each batch. Batches are the resampled units."""

    new_tokens: Tensor  # [batches]
    steps: Tensor
    uncut_tokens: Tensor
    seconds: Tensor  # [R, batches]

    @classmethod
    def of(cls, prompts: Sequence[PromptFigures]) -> Sample:
        """Sum up figures of prompts, from this run or from the JSON of an earlier one."""
        batches = sorted({prompt.batch for prompt in prompts})
        groups = [[prompt for prompt in prompts if prompt.batch == batch] for batch in batches]
        rows = [[[p.new_tokens, p.steps, p.uncut_tokens, *p.seconds] for p in group] for group in groups]
        new_tokens, steps, uncut_tokens, *seconds = torch.stack([torch.tensor(row).double().sum(0) for row in rows], 1)
        return cls(new_tokens.float(), steps.float(), uncut_tokens.float(), torch.stack(seconds).float())

    @property
    def num_batches(self) -> int:
        return len(self.steps)

    @property
    def can_vary(self) -> bool:
        """Whether there is more than one batch or round; a single measurement does not show its own spread."""
        return self.seconds.numel() > 1

    def resampling(self, seed: int = 0) -> Resampling:
        """Draw as many batches and rounds as this sample has."""
        generator = torch.Generator().manual_seed(seed)
        count, (rounds, _) = self.num_batches, self.seconds.shape
        chosen = torch.randint(count, (NUM_DRAWS, count), generator=generator)
        times = torch.zeros(NUM_DRAWS, count).scatter_add_(1, chosen, torch.ones(NUM_DRAWS, count))
        return Resampling(times, torch.randint(rounds, (NUM_DRAWS, rounds), generator=generator))

    def tau(self, drawn: Resampling) -> Tensor:
        """tau in each draw [D]."""
        return (drawn.batches @ self.uncut_tokens) / (drawn.batches @ self.steps).clamp_min(1)

    def rates(self, drawn: Resampling) -> Tensor:
        """Tokens per second in each draw and round [D, R]."""
        seconds = drawn.batches @ self.seconds.T
        return ((drawn.batches @ self.new_tokens)[:, None] / seconds.clamp_min(1e-9)).gather(1, drawn.rounds)

    def speedup(self, other: Sample, drawn: Resampling) -> Tensor:
        """Median over rounds of the ratio of rates within a round, in each draw [D]."""
        ratio = self.rates(drawn) / other.rates(drawn).clamp_min(1e-9)
        return ratio.quantile(0.5, dim=1)


def interval(values: Tensor) -> Interval:
    """The middle 95 % of resampled figures [D]."""
    tail = (1 - COVERAGE) / 2
    low, high = values.quantile(torch.tensor([tail, 1 - tail])).tolist()
    return low, high


IDENTITY = ("command", "date", "commit", "memory")
"""Settings and facts that differ between any two runs, and explain nothing."""
VERSIONS = ("torch", "transformers", "python", "medusa")
BASELINES = {"speedup": "plain", "speedup_vs_generate": "transformers"}
"""The method that each speedup is measured against."""
LABELS = {"speedup": "x plain", "speedup_vs_generate": "x generate", "tau": "tau"}


@dataclass
class Change:
    """One figure of one method in both runs."""

    method: str
    figure: str
    earlier: float
    later: float
    ratio: float
    """The later figure over the earlier one."""
    ratio_interval: Interval | None
    """The interval that holds 95 % of resampled ratios; `None` if a run had a single prompt and round."""

    @property
    def label(self) -> str:
        return f"{self.method}, {LABELS[self.figure]}"

    @property
    def verdict(self) -> str:
        """The direction of the change, if the interval shows one."""
        if self.ratio_interval is None:
            return "unknown: a single measurement"
        low, high = self.ratio_interval
        return "higher" if low > 1 else "lower" if high < 1 else "no difference seen"


@dataclass
class Comparison:
    """An earlier run and a later one."""

    earlier: str
    later: str
    differences: list[tuple[str, str, str]]
    """(name, earlier value, later value) of machine and settings."""
    same_machine: bool
    changes: list[Change]
    rates: dict[str, tuple[float, float]]
    """Median tokens per second of each method in the earlier run and in the later one."""

    def to_json(self) -> dict[str, object]:
        """The comparison as `medusa benchmark --json` lists it."""
        changes = [asdict(change) | {"label": change.label, "verdict": change.verdict} for change in self.changes]
        return asdict(self) | {"changes": changes}


def compare(earlier: BenchmarkResult, later: BenchmarkResult, names: tuple[str, str]) -> Comparison:
    """Compare two benchmarks. `names`: how tables and error messages call them.

    Raises:
        RequestError: a benchmark has no figures of its prompts, or the prompts differ.
    """
    for result, name in zip((earlier, later), names, strict=True):
        result.require_prompts(name)
    if earlier.settings.prompts_sha256 != later.settings.prompts_sha256:
        raise RequestError(
            f"{names[0]} and {names[1]} decoded other prompts ({earlier.settings.prompts} and "
            f"{later.settings.prompts} of them, or another tokenizer), so nothing can be paired; "
            "run both on the same --prompts"
        )
    common = [name for name in later.methods if name in earlier.methods]
    machine = _differences(asdict(earlier.machine), asdict(later.machine))
    return Comparison(
        *names,
        differences=machine + _differences(earlier.settings.to_json(), later.settings.to_json()),
        same_machine=all(name in VERSIONS for name, _, _ in machine),
        changes=[change for name in common for change in _changes(name, earlier.methods, later.methods)],
        rates={
            name: (earlier.methods[name].tokens_per_second.median, later.methods[name].tokens_per_second.median)
            for name in common
        },
    )


def _differences(earlier: dict[str, object], later: dict[str, object]) -> list[tuple[str, str, str]]:
    def short(name: str, value: object) -> str:
        return f"{1 + len(value)} nodes" if name == "tree" and isinstance(value, list) else str(value)

    return [
        (name, short(name, earlier.get(name)), short(name, later.get(name)))
        for name in earlier | later
        if name not in IDENTITY and earlier.get(name) != later.get(name)
    ]


def _changes(name: str, earlier: dict[str, MethodFigures], later: dict[str, MethodFigures]) -> list[Change]:
    """All figures of method `name` that can be compared."""
    then, now = ({method: Sample.of(run[method].prompts or []) for method in run} for run in (earlier, later))
    # Both runs share one draw of prompts, unless their batches differ. Rounds are drawn for each run.
    drawn_then, drawn_now = then[name].resampling(), now[name].resampling(seed=1)
    if then[name].num_batches == now[name].num_batches:
        drawn_now = drawn_now._replace(batches=drawn_then.batches)
    ratios = {
        figure: now[name].speedup(now[baseline], drawn_now) / then[name].speedup(then[baseline], drawn_then)
        for figure, baseline in BASELINES.items()
        if name != baseline
    }
    if name == "medusa":
        ratios["tau"] = now[name].tau(drawn_now) / then[name].tau(drawn_then)
    found = []
    for figure, resampled in ratios.items():
        can_vary = now[name].num_batches > 1 if figure == "tau" else then[name].can_vary and now[name].can_vary
        before, after = getattr(earlier[name], figure), getattr(later[name], figure)
        ratio = after / before if before else 0.0
        found.append(Change(name, figure, before, after, ratio, interval(resampled) if can_vary else None))
    return found


def interval_in_words(interval: Interval | None) -> str:
    """An interval for tables, such as `1.20 to 1.35`; empty if there is none."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
