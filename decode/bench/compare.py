"""Bootstrap intervals of benchmark metrics, and comparisons of two benchmarks on the same prompts.

Rounds and batches of prompts are drawn repeatedly with replacement, and an interval holds 95 % of the resampled
metrics. It shows how far a metric may move with other prompts of the same kind, or at another time on this machine.
Both sides of a ratio use the same draws of prompts, so differences between prompts do not count as noise. Speedups are
ratios of rates within one run, so they can be compared between machines; tokens per second cannot.

Shapes: R rounds, B batches of prompts, D bootstrap draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from decode.bench.figures import Interval, MethodFigures, PromptFigures
from decode.bench.result import BenchmarkResult
from medusa.errors import RequestError

NUM_DRAWS = 2000  # number of bootstrap draws
IDENTITY = ("command", "date", "commit", "memory")  # not compared: they differ between any two runs
VERSIONS = ("torch", "transformers", "python", "medusa")
BASELINES = {"speedup": "plain", "speedup_vs_generate": "transformers"}  # the method each speedup is relative to
LABELS = {"speedup": "x plain", "speedup_vs_generate": "x generate", "tau": "tau"}


class Resampling(NamedTuple):
    """Random draws of a benchmark's batches and rounds for a bootstrap. Metrics to be compared use the same draws."""

    batches: Tensor  # [D, B] number of times that each draw contains each batch
    rounds: Tensor  # [D, R] indices of the rounds in each draw


@dataclass
class Sample:
    """Counts, taus and times (in seconds) of one decoding method, for each of B batches of prompts and R rounds."""

    new_tokens: Tensor  # [B]
    steps: Tensor  # [B]
    uncut_tokens: Tensor  # [B] the new tokens and the tokens of the last step past the text's end, which are cut off
    texts: Tensor  # [B] texts with at least one step
    taus: Tensor  # [B] sum of the tau of each of these texts
    seconds: Tensor  # [R, B]

    @classmethod
    def of(cls, prompts: Sequence[PromptFigures]) -> Sample:
        """Make a sample from counts and times of single prompts, by summing them over each batch."""
        groups = [[p for p in prompts if p.batch == batch] for batch in sorted({p.batch for p in prompts})]
        rows = [
            [[p.new_tokens, p.steps, p.uncut_tokens, p.steps > 0, p.tau, *p.seconds] for p in its] for its in groups
        ]
        sums = torch.stack([torch.tensor(row, dtype=torch.double).sum(0) for row in rows], 1).float()
        new_tokens, steps, uncut_tokens, texts, taus = sums[:5]
        return cls(new_tokens, steps, uncut_tokens, texts, taus, sums[5:])

    @property
    def num_batches(self) -> int:
        return len(self.steps)

    @property
    def can_vary(self) -> bool:
        """Whether the sample has more than one batch or round, so that resampled metrics can differ."""
        return self.seconds.numel() > 1

    def resampling(self, seed: int = 0) -> Resampling:
        """Make `NUM_DRAWS` draws, each with replacement and of as many batches and rounds as this sample has."""
        generator = torch.Generator().manual_seed(seed)
        count, (rounds, _) = self.num_batches, self.seconds.shape
        chosen = torch.randint(count, (NUM_DRAWS, count), generator=generator)
        times = torch.zeros(NUM_DRAWS, count).scatter_add_(1, chosen, torch.ones(NUM_DRAWS, count))
        return Resampling(times, torch.randint(rounds, (NUM_DRAWS, rounds), generator=generator))

    def tau(self, drawn: Resampling) -> Tensor:
        """Compute tau (mean tokens per step) in each of D bootstrap draws, [D]."""
        return (drawn.batches @ self.uncut_tokens) / (drawn.batches @ self.steps).clamp_min(1)

    def mean_tau(self, drawn: Resampling) -> Tensor:
        """Compute the mean over the texts of each text's tau in each of D bootstrap draws, [D]."""
        return (drawn.batches @ self.taus) / (drawn.batches @ self.texts).clamp_min(1)

    def rates(self, drawn: Resampling) -> Tensor:
        """Compute tokens per second in each of D bootstrap draws, for each of the R rounds in a draw, [D, R]."""
        seconds = drawn.batches @ self.seconds.T
        return ((drawn.batches @ self.new_tokens)[:, None] / seconds.clamp_min(1e-9)).gather(1, drawn.rounds)

    def speedup(self, other: Sample, drawn: Resampling) -> Tensor:
        """Compute the speedup over `other` in each of D draws, [D]: the median over rounds of the ratio of rates."""
        return (self.rates(drawn) / other.rates(drawn).clamp_min(1e-9)).quantile(0.5, dim=1)


def interval(values: Tensor) -> Interval:
    """Return the bounds of the middle 95 % of a metric's values [D] in D bootstrap draws."""
    return float(values.quantile(0.025)), float(values.quantile(0.975))


@dataclass
class Change:
    """The change of one metric of one decoding method from an earlier benchmark run to a later one."""

    method: str
    figure: str  # the metric: `speedup`, `speedup_vs_generate` or `tau`
    earlier: float
    later: float
    ratio: float  # the later value of the metric divided by the earlier value
    ratio_interval: Interval | None  # of 95 % of the resampled ratios; `None` if a run measured the metric only once
    label: str  # the method and its metric, for tables
    verdict: str  # the direction of the change in words, or a statement that the interval shows no clear change


@dataclass
class Comparison:
    """Two benchmark runs compared: settings and machine facts that differ, and the changes of speedups and tau."""

    earlier: str
    later: str
    differences: list[tuple[str, str, str]]  # name, earlier and later value of each fact or setting that differs
    same_machine: bool
    changes: list[Change]
    rates: dict[str, tuple[float, float]]  # median tokens per second of each method, in the earlier and the later run

    def to_json(self) -> dict[str, object]:
        """Return the comparison as `medusa benchmark --json` lists it."""
        return asdict(self)


def compare(earlier: BenchmarkResult, later: BenchmarkResult, names: tuple[str, str]) -> Comparison:
    """Compare the results of two benchmark runs. `names`: their names in tables and error messages.

    Raises RequestError if a benchmark has no metrics of single prompts, or if the two decoded different prompts."""
    for result, name in zip((earlier, later), names, strict=True):
        result.require_prompts(name)
    then, now = earlier.settings, later.settings
    if then.prompts_sha256 != now.prompts_sha256:
        raise RequestError(
            f"{names[0]} and {names[1]} decoded other prompts ({then.prompts} and {now.prompts} of them, or another "
            "tokenizer), so nothing can be paired; run both on the same --prompts"
        )
    machine = _differences(asdict(earlier.machine), asdict(later.machine))
    pairs = {name: (earlier.methods[name], of) for name, of in later.methods.items() if name in earlier.methods}
    return Comparison(
        *names,
        differences=machine + _differences(then.to_json(), now.to_json()),
        same_machine=all(name in VERSIONS for name, _, _ in machine),
        changes=[change for name in pairs for change in _changes(name, earlier.methods, later.methods)],
        rates={name: (a.tokens_per_second.median, b.tokens_per_second.median) for name, (a, b) in pairs.items()},
    )


def _differences(earlier: dict[str, object], later: dict[str, object]) -> list[tuple[str, str, str]]:
    found = []
    for name in earlier | later:
        values = [run.get(name) for run in (earlier, later)]
        if name not in IDENTITY and values[0] != values[1]:
            if name == "tree":
                values = [f"{1 + len(value)} nodes" if isinstance(value, list) else value for value in values]
            found.append((name, str(values[0]), str(values[1])))
    return found


def _changes(name: str, earlier: dict[str, MethodFigures], later: dict[str, MethodFigures]) -> list[Change]:
    """List how the metrics of method `name` changed. `earlier`, `later`: the metrics of each run, by method name."""
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
        ratio, verdict, bounds = after / before if before else 0.0, "unknown: a single measurement", None
        if can_vary:
            bounds = low, high = interval(resampled)
            verdict = "higher" if low > 1 else "lower" if high < 1 else "no difference seen"
        found.append(Change(name, figure, before, after, ratio, bounds, f"{name}, {LABELS[figure]}", verdict))
    return found
