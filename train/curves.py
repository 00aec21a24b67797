"""A picture of a run: the loss, and how often each head's best guess is right, by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa.files import replacing

PICTURE = "training.png"


def draw_curves(log: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw the log of a run into a PNG file; False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, guesses = figure.subplots(1, 2)
    for prefix, style in (("", "-"), ("eval_", "--")):
        lines = [line for line in log if f"{prefix}loss" in line]
        steps = [line["step"] for line in lines]
        if not lines:
            continue
        loss.plot(steps, [line[f"{prefix}loss"] for line in lines], style, color="black", label=f"{prefix}loss")
        for head in range(1, heads_in(lines) + 1):
            shares = [line.get(f"{prefix}head{head}_top1") for line in lines]
            guesses.plot(steps, shares, style, color=f"C{head - 1}", label=f"{prefix}head {head}")
    loss.set(xlabel="step", ylabel="weighted loss (nats)")
    guesses.set(xlabel="step", ylabel="top-1", ylim=(0, 1))
    for axes in (loss, guesses):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def heads_in(lines: Sequence[Mapping[str, Any]]) -> int:
    """The number of heads in the last line of a log."""
    heads = 0
    while any(key.endswith(f"head{heads + 1}_top1") for key in lines[-1]):
        heads += 1
    return heads
