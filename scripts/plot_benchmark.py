"""A picture of a benchmark: speed by method, how deep guesses are accepted, where a step's time goes.

medusa benchmark --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl --json b.json
python scripts/plot_benchmark.py b.json docs/images/benchmark.png

`medusa benchmark --report` makes a page of the same pictures and more; this is one PNG, for a README.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from decode.bench.report import plots as pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", type=Path, help="JSON of medusa benchmark")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args()
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(json.loads(args.benchmark.read_text(encoding="utf-8"))).savefig(args.picture, dpi=150, bbox_inches="tight")


def draw(outcome: dict[str, Any]) -> Figure:
    """Four panels, and the machine below."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    panels = figure.subplots(2, 2)
    methods, medusa = outcome["methods"], outcome["methods"]["medusa"]
    pictures.rates(panels[0, 0], methods)
    pictures.speedups(panels[0, 1], methods)
    pictures.depths(panels[1, 0], medusa)
    pictures.stages(panels[1, 1], methods)
    machine, settings = outcome["machine"], outcome["settings"]
    figure.supxlabel(
        f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, temperature "
        f"{settings['temperature']:g}, {settings['nodes']} nodes; {machine['gpu'] or machine['processor']}, "
        f"{machine['threads']} thread(s), {machine['dtype']}, torch {machine['torch']}",
        fontsize=8,
        color=pictures.INK["faint"],
    )
    return figure


if __name__ == "__main__":
    main()
