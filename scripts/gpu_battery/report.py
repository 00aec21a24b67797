"""The battery's report: one Markdown page of tables, made from the file of figures."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from medusa.files import write_text
from script_tools import markdown_table
from scripts.gpu_battery.run import Figure, read_figures
from scripts.gpu_battery.stages import STAGES

REPORT = "report.md"
ALL = ("stage", "event")  # fields that are no columns of a table


def write_report(output: Path) -> Path:
    """Write report.md from the figures in `output`, and return its path."""
    figures = read_figures(output)
    parts = ["# GPU battery", headline(figures.get("machine", [{}])[-1]), stage_table(figures)]
    for name in STAGES:
        shown = [figure for figure in figures.get(name, ()) if "event" not in figure]
        if shown:
            parts += [f"## {name}", (STAGES[name].run.__doc__ or "").split("\n")[0]]
            parts += [curve_table(shown)] if name == "curves" else [table(shown)]
    write_text(output / REPORT, "\n\n".join(parts) + "\n")
    return output / REPORT


def headline(about: Figure) -> str:
    """Describe the machine, the versions, the date and the commit in one sentence."""
    toy = "Toy sizes on a CPU: these figures only show that every stage runs. " if about.get("toy") else ""
    return (
        f"{toy}{about.get('gpu') or about.get('processor')}, torch {about.get('torch')}, transformers "
        f"{about.get('transformers')}; {about.get('date')}, commit {about.get('commit')}."
    )


def stage_table(figures: dict[str, list[Figure]]) -> str:
    """Tabulate how each stage ended, its time and its peak memory; a stage without an end was interrupted."""
    rows = []
    for name in (name for name in STAGES if name in figures):
        events = {figure["event"]: figure for figure in figures[name] if "event" in figure}
        end, memory = events.get("end", {"status": "interrupted"}), events.get("memory", {})
        rows.append([name, end["status"], cell(end.get("seconds")), cell(memory.get("peak_mb")), end.get("error", "")])
    return markdown_table(["stage", "status", "seconds", "peak MB", "error"], rows)


def table(figures: Sequence[Figure]) -> str:
    """Tabulate figures as rows; every field that a figure has becomes a column."""
    columns = list(dict.fromkeys(key for figure in figures for key in figure if key not in ALL))
    return markdown_table(
        [name.replace("_", " ") for name in columns],
        [[cell(figure.get(name)) for name in columns] for figure in figures],
    )


def curve_table(figures: Sequence[Figure]) -> str:
    """Tabulate the milliseconds of a step, with the ratio T(n)/T(1) to a step of plain decoding."""
    timed, rest = ([f for f in figures if ("nodes" in f) is has_nodes] for has_nodes in (True, False))
    point = itemgetter("model", "how", "context", "batch")
    plain = {point(figure): figure["ms"] for figure in timed if figure["nodes"] == 1 and "ms" in figure}
    for figure in timed:
        if "ms" in figure and point(figure) in plain:
            figure["T(n)/T(1)"] = figure["ms"] / plain[point(figure)]
    return "\n\n".join(table(part) for part in (timed, rest) if part)


def cell(value: object) -> str:
    """Format a value for a cell of a table."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(inner)}" for name, inner in value.items())
    return "" if value is None else str(value)
