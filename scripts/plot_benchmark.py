"""A picture of a benchmark: tokens per second by method, how deep guesses are accepted, where a step's time goes.

medusa benchmark --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl --json b.json
python scripts/plot_benchmark.py b.json docs/images/benchmark.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {"plain": "#9aa5b1", "transformers": "#52606d", "medusa": "#0b7a75"}
STAGE_COLORS = ["#0b7a75", "#19a29c", "#7bc8a4", "#f2c14e", "#d9d9d9"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark", type=Path, help="JSON of medusa benchmark")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args()
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(json.loads(args.benchmark.read_text(encoding="utf-8"))).savefig(args.picture, dpi=150, bbox_inches="tight")


def draw(outcome: dict[str, Any]) -> Any:
    """Three panels, and the machine below."""
    figure, (speed, depth, stages) = plt.subplots(1, 3, figsize=(12, 3.2), gridspec_kw={"width_ratios": [3, 2, 3]})
    methods, medusa = outcome["methods"], outcome["methods"]["medusa"]
    names = list(methods)
    rates = [methods[name]["tokens_per_second"]["median"] for name in names]
    bars = speed.barh(names, rates, color=[COLORS.get(name, "#888888") for name in names])
    speed.bar_label(
        bars,
        [
            f" {rate:.0f}  ({methods[n]['speedup_vs_generate']:.2f} x generate)"
            for n, rate in zip(names, rates, strict=True)
        ],
    )
    speed.set(title="tokens per second", xlim=(0, 2.1 * max(rates)))
    speed.invert_yaxis()
    accepted = medusa["accepted_by_depth"]
    depth.bar(range(1, len(accepted) + 1), accepted, color=COLORS["medusa"])
    depth.set(title=f"accepted to depth (tau {medusa['tau']:.2f})", ylim=(0, 1), xticks=range(1, len(accepted) + 1))
    left = 0.0
    for (stage, value), color in zip(medusa["step_ms"].items(), STAGE_COLORS, strict=True):
        stages.barh(["step"], [value], left=left, color=color, label=f"{stage} {value:.2f} ms")
        left += value
    stages.set(title=f"a step: {left:.2f} ms", yticks=[])
    stages.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=8)
    for axes in (speed, depth, stages):
        axes.spines[["top", "right"]].set_visible(False)
    machine, settings = outcome["machine"], outcome["settings"]
    figure.text(
        0.5,
        -0.3,
        f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, temperature "
        f"{settings['temperature']:g}, {settings['nodes']} nodes; {machine['gpu'] or machine['processor']}, "
        f"{machine['threads']} thread(s), {machine['dtype']}, torch {machine['torch']}",
        ha="center",
        fontsize=8,
        color="#52606d",
    )
    return figure


if __name__ == "__main__":
    main()
