"""Two benchmarks of the same prompts compared: what changed, and whether the difference is more than noise.

Speedups are ratios within a run, so they may be compared between machines; tokens per second may not. Intervals are
paired: a resampling draws the same prompts in both runs, so that hard prompts do not count as noise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from decode.bench.figures import BenchmarkResult, Interval, MethodFigures
from decode.bench.intervals import Sample, interval
from medusa.errors import RequestError

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
    """95 % of resampled ratios lie in it; `None` if a run had a single prompt and round."""

    @property
    def label(self) -> str:
        return f"{self.method}, {LABELS[self.figure]}"

    @property
    def verdict(self) -> str:
        """What the interval says, in words."""
        if self.ratio_interval is None:
            return "one measurement: no telling"
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
    """Compare two benchmarks that messages call `names`.

    Raises:
        RequestError: a benchmark without figures of its prompts, or two benchmarks of different prompts.
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
    names = [*earlier, *(name for name in later if name not in earlier)]
    return [
        (name, _short(name, earlier.get(name)), _short(name, later.get(name)))
        for name in names
        if name not in IDENTITY and earlier.get(name) != later.get(name)
    ]


def _short(name: str, value: object) -> str:
    return f"{1 + len(value)} nodes" if name == "tree" and isinstance(value, list) else str(value)


def _changes(name: str, earlier: dict[str, MethodFigures], later: dict[str, MethodFigures]) -> list[Change]:
    """All figures of method `name` that can be compared."""
    then, now = ({method: Sample.of(run[method].prompts or []) for method in run} for run in (earlier, later))
    # One draw of prompts serves both runs, unless their batches differ. Rounds are drawn for each run.
    drawn_then, drawn_now = then[name].resampling(), now[name].resampling(seed=1)
    if then[name].num_batches == now[name].num_batches:
        drawn_now = drawn_now._replace(batches=drawn_then.batches)
    can_vary = then[name].can_vary and now[name].can_vary
    found = []
    for figure, baseline in BASELINES.items():
        if name != baseline:
            ratios = now[name].speedup(now[baseline], drawn_now) / then[name].speedup(then[baseline], drawn_then)
            before, after = getattr(earlier[name], figure), getattr(later[name], figure)
            found.append(_change(name, figure, before, after, interval(ratios) if can_vary else None))
    if name == "medusa":
        ratios = now[name].tau(drawn_now) / then[name].tau(drawn_then)
        varies = now[name].num_batches > 1
        found.append(_change(name, "tau", earlier[name].tau, later[name].tau, interval(ratios) if varies else None))
    return found


def _change(name: str, figure: str, then: float, now: float, ratio_interval: Interval | None) -> Change:
    return Change(name, figure, then, now, now / then if then else 0.0, ratio_interval)


def interval_in_words(interval: Interval | None) -> str:
    """An interval for tables; empty if there is none."""
    return "" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"
