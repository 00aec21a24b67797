"""Draw a benchmark: speed by method, the depth of accepted guesses, and where the time of a step goes.

    medusa benchmark --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl --json b.json
    python scripts/plot_benchmark.py b.json docs/images/benchmark.png

`medusa benchmark --report` makes a page of the same pictures and more; this is one PNG, for a README.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from decode.bench.figures import BenchmarkResult
from decode.bench.report import plots
from decode.bench.report.plots import INK
from medusa.files import read_json
from script_tools import run_script, script_parser


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("benchmark", type=Path, help="JSON of medusa benchmark")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args(argv)
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    result = BenchmarkResult.from_json(read_json(args.benchmark), str(args.benchmark))
    draw(result).savefig(args.picture, dpi=150, bbox_inches="tight")


def draw(result: BenchmarkResult) -> Figure:
    """Draw four panels, with the machine below them."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    panels = figure.subplots(2, 2)
    plots.rates(panels[0, 0], result.methods)
    plots.speedups(panels[0, 1], result.methods)
    plots.depths(panels[1, 0], result.medusa)
    plots.stages(panels[1, 1], {name: of.step_ms for name, of in result.methods.items() if of.step_ms})
    machine, settings = result.machine, result.settings
    figure.supxlabel(
        f"{settings.prompts} prompts, {settings.max_new_tokens} new tokens, temperature "
        f"{settings.temperature:g}, {settings.nodes} nodes; {machine.device}, {machine.threads} thread(s), "
        f"{machine.dtype}, torch {machine.torch}",
        fontsize=8,
        color=INK["faint"],
    )
    return figure


if __name__ == "__main__":
    run_script(main)
