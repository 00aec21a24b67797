"""Prints benchmarks, comparisons, verifications and calibrations as tables on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from decode.bench.calibration.stored import Calibration
from decode.bench.compare import Comparison
from decode.bench.figures import PERCENT, Interval, interval_in_words
from decode.bench.losslessness.cases import SLOW_SHARE, figures_table
from decode.bench.losslessness.verify import VerificationResult
from decode.bench.result import FASTER, BenchmarkResult, counted
from decode.rules import is_lossy
from medusa.files import per_second
from medusa.tables import print_table


def print_benchmark(console: Console, result: BenchmarkResult) -> None:
    """Print the metrics of a benchmark: a table of all methods, then details of the drafter."""
    settings, machine, medusa = result.settings, result.machine, result.medusa
    rows = []
    for name, figures in result.methods.items():
        rate, tau = figures.tokens_per_second, f"{figures.tau:.2f}" if figures.steps else ""
        rates = (per_second(rate.median), f"{per_second(rate.min)}-{per_second(rate.max)}")
        equal = f"{figures.equal_to_plain:.0%}" if settings.temperature == 0 else "(sampled)"
        rows.append([name, *rates, tau, f"{figures.speedup:.2f}", f"{figures.speedup_vs_generate:.2f}", equal])
    print_table(
        console,
        ("method", "tokens/s", "min-max", "tau", "x plain", "x generate", "same text"),
        rows,
        f"{counted(settings.prompts, 'prompt')}, {counted(settings.max_new_tokens, 'new token')}, "
        f"temperature {settings.temperature:g}, {settings.drafter}, {settings.nodes} nodes, "
        f"acceptance {settings.acceptance}",
    )
    if medusa.steps and medusa.mean_tau is not None:
        mean = f"{medusa.mean_tau:.2f}{_of_95(medusa.mean_tau_interval)} as the mean of the texts' tau"
        console.print(f"tau {medusa.tau:.2f}{_of_95(medusa.tau_interval)} over all steps, {mean}")
    if told := result.misprediction:
        console.print(told, style="yellow", highlight=False, markup=False)
    for category, figures in (medusa.by_category or {}).items():
        console.print(f"  {category}: tau {figures.tau:.2f}, {figures.speedup:.2f} x plain")
    for row in result.temperatures or []:
        console.print(f"  temperature {row.temperature:g}: tau {row.tau:.2f}, {row.speedup_vs_generate:.2f} x generate")
    for rule in result.lossy or []:
        console.print(
            f"  {rule.acceptance}{'' if rule.lossless else ' (lossy)'}, temperature {rule.temperature:g}: tau "
            f"{rule.tau:.2f}, {rule.speedup_vs_generate:.2f} x generate, {rule.log_likelihood:.2f} nats per token"
        )
    stages = medusa.step_ms or {}
    total = sum(stages.values()) or 1.0
    shares = ", ".join(f"{stage} {value / total:.0%}" for stage, value in stages.items())
    console.print(f"a step takes {total:.2f} ms: {shares}")
    versions = f"torch {machine.torch}, transformers {machine.transformers}"
    console.print(f"{machine.device}, {counted(machine.threads, 'thread')}, {machine.dtype}, {versions}")
    if is_lossy(settings.acceptance):
        console.print(f"acceptance '{settings.acceptance}' is lossy: the text may differ from the backbone's")


def _of_95(interval: Interval | None) -> str:
    """Format a 95 % interval over prompts in brackets; empty if there is none."""
    return f" ({PERCENT}: {interval_in_words(interval)})" if interval else ""


def print_headline(console: Console, result: BenchmarkResult) -> None:
    """Print the headline of a benchmark: the gain over plain decoding, or that there is none. Print it last."""
    told = result.headline
    style = "bold green" if told.verdict == FASTER else "bold yellow"
    console.print()
    console.print(Text.assemble((told.claim, style), " ", told.details))


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print how metrics and settings changed between two benchmark runs."""
    console.print(f"{comparison.later} against {comparison.earlier}", highlight=False)
    rows = []
    for change in comparison.changes:
        figures = (f"{change.earlier:.2f}", f"{change.later:.2f}", f"{change.ratio:.3f}")
        rows.append([change.label, *figures, interval_in_words(change.ratio_interval), change.verdict])
    print_table(console, ("", "earlier", "later", "ratio", "95 %", ""), rows)
    for what, earlier, later in comparison.differences:
        console.print(f"  {what}: {earlier} -> {later}", highlight=False)
    if not comparison.same_machine:
        console.print("machine, threads or dtype differ: ratios may be compared, tokens per second may not")


def print_verification(console: Console, outcome: VerificationResult, full: bool, report: str | None) -> None:
    """Print the outcome of `medusa verify`. With `full`, show temperature and top-p.

    `report`: the path of the page that was written; `None` if there is none."""
    console.print(f"greedy: {outcome.greedy.in_words(outcome.asked.dtype)}")
    head, rows = figures_table(outcome.cases)
    narrow = [0, 1, 2, *((3, 4, 5) if full else (5, 6, 7)), 10, 11]  # what 80 columns can hold
    place = head.index("verdict")
    draws = max((case.first.draws for case in outcome.cases), default=0)
    told = f"{draws:,} draws by each rule, in two levels of the tree; draft 'sample' has two children a node"
    if any(case.rule.whole for case in outcome.cases):
        told += f", and 'sample, whole' has all children and 1/{SLOW_SHARE} of the draws"
    print_table(
        console,
        [head[column] for column in narrow],
        [[row[column] for column in narrow] for row in rows],
        told,
        keys=6 if full else 4,
        justify="left",
        styles=[{"DIFFERS": "red", "passed": ""}.get(row[place], "dim") for row in rows],
    )
    verdict = "passed" if outcome.passed else "FAILED: evidence against equality"
    console.print(Text.assemble((verdict, "bold"), f"; report: {report}" if report else ""), soft_wrap=True)


def print_calibration(console: Console, found: Calibration, measured: float | None, place: Path) -> None:
    """Print the trees that a calibration tried, its file `place`, and tau `measured` on held-out texts (or `None`)."""
    rows, plain = [], found.points[0].tokens_per_second
    speed = "tokens/s" if found.holds_for.get("batch_size", 1) == 1 else "tokens/s of each text"
    for index, point in enumerate(found.points):
        rate = point.tokens_per_second
        figures = (f"{point.tau:.2f}", f"{point.step_ms:.2f}", f"{rate:.0f}", f"{rate / plain:.2f}")
        rows.append([point.kind, str(point.nodes), *figures, "chosen" if index == found.chosen else ""])
    print_table(
        console,
        ("draft", "nodes", "tau", "ms per step", speed, "x plain", ""),
        rows,
        keys=2,
        styles=["bold" if index == found.chosen else "" for index in range(len(rows))],
    )
    if found.best.drafter != "heads":
        console.print(f"chosen: --drafter {found.best.drafter}", markup=False)
    if found.best.nodes == 1:
        console.print("plain decoding is fastest here: these heads guess too little for the cost of a tree")
    elif found.why_not_fastest:
        console.print(found.why_not_fastest, highlight=False)
    if found.shortlist is not None:
        console.print(f"fastest with {found.shortlist} candidates of each head")
    if measured is not None:
        console.print(f"predicted tau {found.best.tau:.3f}, measured on held-out texts {measured:.3f}")
    console.print(f"made from {found.texts.described}; other kinds of text can be slower", markup=False)
    console.print(f"kept for --tree auto in {place}", soft_wrap=True, markup=False)
