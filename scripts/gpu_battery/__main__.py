"""Measure everything that needs a GPU, in three calls of under nine minutes each, without a network.

    python -m scripts.gpu_battery --call 1 --output runs/battery     curves, losses, sharding
    python -m scripts.gpu_battery --call 2 --output runs/battery     backbone, heads
    python -m scripts.gpu_battery --call 3 --output runs/battery     benchmark, verify, kinds
    python -m scripts.gpu_battery --stage curves --output runs/battery     one stage again
    python -m scripts.gpu_battery --rehearse --output runs/rehearsal     every stage at toy size, on any CPU
    python -m scripts.gpu_battery --report --output runs/battery     only write report.md again

Run the battery from the root of the repository; only the dependencies of the packages must be installed. Each figure
is appended to figures.jsonl at once, with the GPU's clocks and power; report.md is one page of tables. Each stage is a
process with a time limit, so a stage that fails or hangs does not affect the figures of other stages.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path

import torch

from decode.bench.machine import commit, machine
from medusa.errors import RequestError
from medusa.files import write_text
from script_tools import markdown_table, run_script, script_parser
from scripts.gpu_battery.curves import curves, losses, sharding
from scripts.gpu_battery.models import backbone, benchmark, heads, kinds, verify
from scripts.gpu_battery.run import Figure, Stage, append, read_figures, run_stage

CALL_SECONDS = 520  # of the nine minutes of a call; the rest is for starting up and for the report
REHEARSAL_FACTOR = 5  # for a slow or busy CPU
REPORT = "report.md"
ALL = ("stage", "event")  # fields that are no columns of a table
STAGES = {
    "curves": Stage(curves, call=1, seconds=380),
    "losses": Stage(losses, call=1, seconds=80),
    "sharding": Stage(sharding, call=1, seconds=60),
    "backbone": Stage(backbone, call=2, seconds=240),
    "heads": Stage(heads, call=2, seconds=280, needs=("backbone",)),
    "benchmark": Stage(benchmark, call=3, seconds=210, needs=("heads",)),
    "verify": Stage(verify, call=3, seconds=90, needs=("heads",)),
    "kinds": Stage(kinds, call=3, seconds=220, needs=("heads",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="keep figures, models and logs here")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--call", type=int, choices=(1, 2, 3), help="run the stages of this call (default: all calls)")
    what.add_argument("--stage", nargs="+", choices=STAGES, help="run these stages")
    what.add_argument("--report", action="store_true", help="run nothing, only write report.md")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU, to see that every stage runs")
    parser.add_argument("--device", default="cuda", help="the GPU (default: %(default)s)")
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    status = 0 if args.report else run_stages(args)
    print(write_report(args.output))
    return status


def run_stages(args: argparse.Namespace) -> int:
    """Run the requested stages in order; return 0 if all finished, else 1. Full sizes without a GPU: RequestError."""
    toy = args.rehearse
    if not toy and not torch.cuda.is_available():
        raise RequestError("PyTorch sees no GPU here; --rehearse runs every stage at toy size on a CPU")
    names = args.stage or [name for name, stage in STAGES.items() if args.call in (None, stage.call)]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"stage": "machine", "event": "start", "toy": toy, "date": date, "commit": commit()}
    append(args.output, about | asdict(machine()))
    factor = REHEARSAL_FACTOR if toy else 1
    end, finished = time.monotonic(), True
    for name in names:
        end += factor * STAGES[name].seconds  # a stage may also use the time that earlier stages did not use
        print(f"{name} ...", end=" ", flush=True)
        outcome = run_stage(name, STAGES[name], args.output, toy, "cpu" if toy else args.device, end - time.monotonic())
        print(f"{outcome['status']}, {outcome['seconds']} s", outcome.get("error", ""), flush=True)
        finished &= outcome["status"] == "done"
    return 0 if finished else 1


def write_report(output: Path) -> Path:
    """Write report.md from the figures in `output`, and return its path."""
    figures = read_figures(output)
    about = figures.get("machine", [{}])[-1]
    toy = "Toy sizes on a CPU: these figures only show that every stage runs. " if about.get("toy") else ""
    versions = f"torch {about.get('torch')}, transformers {about.get('transformers')}"
    headline = f"{toy}{about.get('gpu') or about.get('processor')}, {versions}; {about.get('date')}"
    parts = ["# GPU battery", f"{headline}, commit {about.get('commit')}.", stage_table(figures)]
    for name in STAGES:
        if shown := [figure for figure in figures.get(name, ()) if "event" not in figure]:
            parts += [f"## {name}", (STAGES[name].run.__doc__ or "").split("\n")[0]]
            parts.append(curve_table(shown) if name == "curves" else table(shown))
    write_text(output / REPORT, "\n\n".join(parts) + "\n")
    return output / REPORT


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
    rows = [[cell(figure.get(name)) for name in columns] for figure in figures]
    return markdown_table([name.replace("_", " ") for name in columns], rows)


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


if __name__ == "__main__":
    run_script(main)
