"""The outcome of a finished training run: its metrics, and a plot of its loss and accuracies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from medusa.files import replacing
from medusa.memory import bytes_of, peak_memory
from train.callbacks import top1_shares
from train.checkpoints import size_on_disk, whole_checkpoints
from train.trainer import MedusaTrainer

PICTURE = "training.png"


@dataclass(frozen=True)
class RunFigures:
    """The metrics of a finished training run: loss, accuracies, time, memory and file sizes."""

    steps: int
    seconds: float | None
    loss: float | None  # mean of the weighted training loss over the steps of the log's last line, in nats
    mean_loss: float | None  # the same over all steps since the start, or since the run was resumed
    reading_share: float  # share of the training time that was spent waiting for data
    peak_memory_bytes: dict[str, int]  # of the process and of each GPU, by name (`medusa.memory`)
    heads_bytes: int
    checkpoint_bytes: int | None  # of the last checkpoint, if there is one: weights and the optimiser's state
    heads: dict[str, float]  # the last `head1_loss`, `head1_top1`, ... in the log
    perplexity_before: float | None = None  # of an adapted backbone, without and with its adapter
    perplexity_after: float | None = None

    @classmethod
    def of(cls, trainer: MedusaTrainer, metrics: dict[str, float]) -> RunFigures:
        """Collect the metrics of a finished run; `metrics` are those that training returned."""
        last = next((line for line in reversed(trainer.state.log_history) if "head1_loss" in line), {})
        saved = whole_checkpoints(Path(str(trainer.args.output_dir)))
        return cls(
            steps=trainer.state.global_step,
            seconds=metrics.get("train_runtime"),
            loss=last.get("loss"),
            mean_loss=metrics.get("train_loss"),
            reading_share=round(trainer.reading_seconds / max(metrics.get("train_runtime", 0), 1e-9), 4),
            peak_memory_bytes=peak_memory(),
            heads_bytes=bytes_of(trainer.heads),
            checkpoint_bytes=size_on_disk(saved[-1]) if saved else None,
            heads={key: value for key, value in last.items() if key.startswith("head")},
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunFigures:
        """Make the metrics from a JSON object of `to_dict`. Keys that are missing, as in older versions, are `None`."""
        plain: dict[str, Any] = {known.name: content.get(known.name) for known in fields(cls)}
        return cls(**plain | {"heads": {key: value for key, value in content.items() if re.match(r"head\d", key)}})

    def to_dict(self) -> dict[str, object]:
        """The metrics as one flat JSON object."""
        plain = {name: value for name, value in vars(self).items() if name != "heads"}
        if self.perplexity_before is None:
            del plain["perplexity_before"], plain["perplexity_after"]
        return plain | self.heads

    def __str__(self) -> str:
        memory = ", ".join(f"{place} {size / 1e6:,.0f} MB" for place, size in self.peak_memory_bytes.items())
        saved = "" if self.checkpoint_bytes is None else f"; a checkpoint {self.checkpoint_bytes / 1e6:,.1f} MB"
        return f"peak memory: {memory}; heads {self.heads_bytes / 1e6:,.1f} MB{saved}"


def draw_curves(log: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot the loss and each head's top-1 accuracy by training step from a run's log, as a PNG file."""
    from matplotlib.figure import Figure  # takes a second to import

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
