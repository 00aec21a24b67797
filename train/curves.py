"""A plot of a training run: the loss and the heads' accuracies by training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from medusa.files import replacing
from train.callbacks import top1_shares

PICTURE = "training.png"


def draw_curves(log: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot the loss and each head's top-1 accuracy by training step from a run's log, as a PNG file."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, guesses = figure.subplots(1, 2)
    for prefix, style in (("", "-"), ("eval_", "--")):
        lines = [line for line in log if f"{prefix}loss" in line]
        steps = [line["step"] for line in lines]
        if lines:
            loss.plot(steps, [line[f"{prefix}loss"] for line in lines], style, color="black", label=f"{prefix}loss")
        for head in range(len(top1_shares(lines[-1], prefix)) if lines else 0):
            shares = [line.get(f"{prefix}head{head + 1}_top1") for line in lines]
            guesses.plot(steps, shares, style, color=f"C{head}", label=f"{prefix}head {head + 1}")
    loss.set(xlabel="step", ylabel="weighted loss (nats)")
    guesses.set(xlabel="step", ylabel="top-1", ylim=(0, 1))
    for axes in (loss, guesses):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
