"""Two benchmarks of the same prompts, side by side: what changed, and whether the difference is more than noise.

Speedups are ratios within a run, so they may be compared between machines too, if one says so; tokens per second not.
Intervals are paired: a resampling draws the same prompts in both runs, so that hard prompts do not count as noise.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from decode.bench.benchmark import Sample, interval
from medusa.errors import RequestError

IDENTITY = ("command", "date", "commit", "memory")
"""Settings and facts that differ between any two runs, and explain nothing."""
FIGURES = {"speedup": "plain", "speedup_vs_generate": "transformers"}
LABELS = {"speedup": "x plain", "speedup_vs_generate": "x generate", "tau": "tau"}


@dataclass
class Change:
    """One figure of one method in both runs; `ratio` is the later one over the earlier."""

    method: str
    figure: str
    earlier: float
    later: float
    ratio: float
    ratio_interval: list[float] | None
    """Holds 95 % of resamplings; `None` where a run had a single prompt and round."""

    @property
    def label(self) -> str:
        return f"{self.method}, {LABELS[self.figure]}"

    @property
    def verdict(self) -> str:
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
    """(what, then, now) of machine and settings."""
    same_machine: bool
    changes: list[Change]
    rates: dict[str, tuple[float, float]]
    """Median tokens per second then and now, by method."""

    def to_dict(self) -> dict[str, Any]:
        out = asdict(self)
        for line, change in zip(out["changes"], self.changes, strict=True):
            line |= {"label": change.label, "verdict": change.verdict}
        return out


def compare(earlier: dict[str, Any], later: dict[str, Any], names: tuple[str, str]) -> Comparison:
    """Compare two contents of `medusa benchmark --json`; `names` are what messages call them.

    Raises:
        RequestError: not a benchmark's, without figures of its prompts, or of other prompts.
    """
    for content, name in zip((earlier, later), names, strict=True):
        require_benchmark(content, name)
    later = json.loads(json.dumps(later))  # what was just measured, as it would be read: lists for tuples
    if earlier["settings"]["prompts_sha256"] != later["settings"]["prompts_sha256"]:
        raise RequestError(
            f"{names[0]} and {names[1]} decoded other prompts ({earlier['settings']['prompts']} and "
            f"{later['settings']['prompts']} of them, or another tokenizer), so nothing can be paired; "
            "run both on the same --prompts"
        )
    common = [name for name in later["methods"] if name in earlier["methods"]]
    machine = _differences(earlier["machine"], later["machine"])
    return Comparison(
        *names,
        differences=machine + _differences(earlier["settings"], later["settings"]),
        same_machine=not [line for line in machine if line[0] not in ("torch", "transformers", "python")],
        changes=[change for name in common for change in _changes(name, earlier["methods"], later["methods"])],
        rates={
            name: tuple(run["methods"][name]["tokens_per_second"]["median"] for run in (earlier, later))
            for name in common
        },
    )


def require_benchmark(content: Any, name: str) -> None:
    """Raises:
    RequestError: `content` is not that of a benchmark's JSON, or of one that kept no figures of its prompts."""
    if not isinstance(content, dict) or not {"machine", "settings", "methods"} <= content.keys():
        raise RequestError(f"{name} is no benchmark; give a file that medusa benchmark --json wrote")
    medusa = content["methods"].get("medusa", {})
    if "prompts_sha256" not in content["settings"] or "prompts" not in medusa:
        raise RequestError(f"{name} holds no figures of its prompts: an earlier version wrote it; run it again")


def _differences(earlier: dict[str, Any], later: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = [*earlier, *(name for name in later if name not in earlier)]
    return [
        (name, _short(name, earlier.get(name)), _short(name, later.get(name)))
        for name in names
        if name not in IDENTITY and earlier.get(name) != later.get(name)
    ]


def _short(name: str, value: Any) -> str:
    return f"{1 + len(value)} nodes" if name == "tree" and isinstance(value, list) else str(value)


def _changes(name: str, earlier: dict[str, Any], later: dict[str, Any]) -> list[Change]:
    then, now = ({method: Sample.of(run[method]["prompts"]) for method in run} for run in (earlier, later))
    # One draw of prompts serves both runs; each run has rounds of its own. Batches may have been cut differently.
    paired = then[name].num_batches == now[name].num_batches
    of_then = then[name].draws()
    of_now = now[name].draws(seed=1)
    if paired:
        of_now = of_now._replace(batches=of_then.batches)
    found = []
    for figure, baseline in FIGURES.items():
        if name != baseline:
            drawn = now[name].speedup(now[baseline], of_now) / then[name].speedup(then[baseline], of_then)
            can_vary = then[name].can_vary and now[name].can_vary
            found.append(_change(name, figure, earlier, later, interval(drawn) if can_vary else None))
    if name == "medusa":
        drawn = now[name].tau(of_now) / then[name].tau(of_then)
        found.append(_change(name, "tau", earlier, later, interval(drawn) if now[name].num_batches > 1 else None))
    return found


def _change(
    name: str, figure: str, earlier: dict[str, Any], later: dict[str, Any], ratio_interval: list[float] | None
) -> Change:
    then, now = earlier[name][figure], later[name][figure]
    return Change(name, figure, then, now, now / then if then else 0.0, ratio_interval)


def interval_in_words(span: list[float] | None) -> str:
    return "" if span is None else f"{span[0]:.2f} to {span[1]:.2f}"
