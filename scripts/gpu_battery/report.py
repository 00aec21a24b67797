"""The report of the battery: one page of tables, made from the file of figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from medusa.files import write_text
from script_tools import markdown_table
from scripts.gpu_battery.run import Figure, Stage, read_figures

REPORT = "report.md"
ALL = ("stage", "event")  # fields that are no columns of a table


def write_report(output: Path, stages: Mapping[str, Stage]) -> Path:
    """Write report.md from the figures in `output`, and return its path."""
    figures = read_figures(output)
    about = next((figure for figure in figures.get("machine", []) if "toy" in figure), {})
    toy = "Toy sizes: these figures only show that every stage runs. " if about.get("toy") else ""
    versions = f"torch {about.get('torch')}, transformers {about.get('transformers')}"
    headline = f"{toy}{about.get('gpu') or about.get('processor')}, {versions}; {about.get('date')}"
    parts = ["# GPU battery", f"{headline}, commit {about.get('commit')}.", stage_table(figures, stages)]
    for name in ("benchmark", "chat"):
        parts += target_lines(figures.get(name, ()))
    for name, stage in stages.items():
        if shown := [figure for figure in figures.get(name, ()) if "event" not in figure]:
            parts += [f"## {name}", (getattr(stage.run, "func", stage.run).__doc__ or "").split("\n")[0]]
            parts += curve_tables(shown) if name in ("MHA", "GQA", "8B") else tables(over_generate(shown))
    write_text(output / REPORT, "\n\n".join(parts) + "\n")
    return output / REPORT


def target_lines(figures: Sequence[Figure]) -> list[str]:
    """Say for each tree whether compiled decoding reaches 0.9 tau T(1) / T(n) times the speed of plain decoding."""
    traces = {figure["traced"]: figure["trace"] for figure in figures if "trace" in figure}
    lines = []
    for figure in figures:
        if "compared" in figure:
            name, nodes = figure["compared"], figure["nodes"]
            tau, one, forward, target, speedup, steps = (
                cell(figure[key])
                for key in ("tau", "forward_of_1_ms", "forward_ms", "target", "speedup", "steps_alone")
            )
            verdict = f"{'met' if figure['met'] else 'missed'}, profile in {traces.get(name, 'no file')}"
            lines.append(
                f"**{figure['stage']}, {name}: {speedup} times compiled plain decoding** ({steps} without the prefill)."
                f" Target: 0.9 tau T(1)/T({nodes}) = 0.9 x {tau} x {one} ms / {forward} ms = {target}: {verdict}."
            )
    return lines


def stage_table(figures: Mapping[str, Sequence[Figure]], stages: Mapping[str, Stage]) -> str:
    """Tabulate how each stage ended, its time and its peak memory; a stage without an end was interrupted."""
    rows = []
    for name in (name for name in stages if name in figures):
        events = {figure["event"]: figure for figure in figures[name] if "event" in figure}
        end, memory = events.get("end", {"status": "interrupted"}), events.get("memory", {})
        rows.append([name, end["status"], cell(end.get("seconds")), cell(memory.get("peak_mb")), end.get("error", "")])
    return markdown_table(["stage", "status", "seconds", "peak MB", "error"], rows)


def over_generate(figures: Sequence[Figure]) -> Sequence[Figure]:
    """Add to each method how many times as fast as greedy `generate` it is, where that was measured."""
    rates = {figure["method"]: figure["tokens_per_second"] for figure in figures if figure.get("tokens_per_second")}
    for figure in figures:
        for name in ("generate, compiled", "generate, eager"):
            if name in rates and figure.get("tokens_per_second"):
                figure[f"times {name}"] = figure["tokens_per_second"] / rates[name]
    return figures


def tables(figures: Sequence[Figure]) -> list[str]:
    """Tabulate figures: those with the same first field share a table, with a column for each field of theirs."""
    groups: dict[object, list[Figure]] = {}
    for figure in figures:
        fields = [name for name in figure if name not in ALL]
        groups.setdefault(figure.get("check", fields[0]), []).append(figure)
    return [table(group) for group in groups.values()]


def table(figures: Sequence[Figure]) -> str:
    """Tabulate figures as rows; every field that a figure has becomes a column."""
    columns = list(dict.fromkeys(key for figure in figures for key in figure if key not in ALL))
    rows = [[cell(figure.get(name)) for name in columns] for figure in figures]
    return markdown_table([name.replace("_", " ") for name in columns], rows)


def curve_tables(figures: Sequence[Figure]) -> list[str]:
    """Tabulate the milliseconds of a step, with the ratio T(n)/T(1) to a step of plain decoding."""
    timed, rest = ([f for f in figures if ("nodes" in f) is has_nodes] for has_nodes in (True, False))
    point = itemgetter("model", "how", "context", "batch")
    plain = {point(figure): figure["ms"] for figure in timed if figure["nodes"] == 1 and figure.get("ms")}
    for figure in timed:
        if figure.get("ms") and point(figure) in plain:
            figure["T(n)/T(1)"] = figure["ms"] / plain[point(figure)]
    return [table(part) for part in (timed, rest) if part]


def cell(value: object) -> str:
    """Format a value for a cell of a table."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(inner)}" for name, inner in value.items())
    return "" if value is None else str(value)
