"""What a run leaves on record: its figures, where its heads come from, and a picture of its log."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from matplotlib.figure import Figure

from medusa.files import replacing
from medusa.memory import bytes_of, peak_memory
from train.build import LoadedRun
from train.callbacks import top1_shares
from train.checkpoints import size_on_disk, whole_checkpoints
from train.medusa2.lm_loss import Quality
from train.trainer import MedusaTrainer

PACKAGES = ("torch", "transformers", "accelerate", "safetensors")
PICTURE = "training.png"


@dataclass(frozen=True)
class RunFigures:
    """The figures of a whole run."""

    steps: int
    seconds: float | None
    loss: float | None
    """Mean over the run."""
    reading_share: float
    """Share of the time spent waiting for data."""
    peak_memory_bytes: dict[str, int]
    """Peak memory of the process and of each GPU (`medusa.memory`)."""
    heads_bytes: int
    checkpoint_bytes: int | None
    """Size with the optimiser's state, about three times the heads; `None` without a checkpoint."""
    heads: dict[str, float]
    """Each head's loss and top-1 in the last line of the log: `head1_loss`, `head1_top1`, ... ."""
    quality: Quality | None
    """Perplexities of an adapted backbone."""

    @classmethod
    def of(cls, trainer: MedusaTrainer, metrics: dict[str, float], quality: Quality | None) -> RunFigures:
        """The figures of a trainer that has trained; `metrics` are the result of its training."""
        last = next((line for line in reversed(trainer.state.log_history) if "head1_loss" in line), {})
        saved = whole_checkpoints(Path(str(trainer.args.output_dir)))
        return cls(
            steps=trainer.state.global_step,
            seconds=metrics.get("train_runtime"),
            loss=metrics.get("train_loss"),
            reading_share=round(trainer.reading_seconds / max(metrics.get("train_runtime", 0), 1e-9), 4),
            peak_memory_bytes=peak_memory(),
            heads_bytes=bytes_of(trainer.heads),
            checkpoint_bytes=size_on_disk(saved[-1]) if saved else None,
            heads={key: value for key, value in last.items() if key.startswith("head")},
            quality=quality,
        )

    @property
    def top1(self) -> list[float]:
        """Share of labels that are each head's best guess, in the last line of the log."""
        return top1_shares(self.heads)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, which is flat."""
        figures = {name: value for name, value in vars(self).items() if name not in ("heads", "quality")}
        if self.quality is not None:
            figures |= {"perplexity_before": self.quality.before, "perplexity_after": self.quality.after}
        return figures | self.heads

    def __str__(self) -> str:
        memory = ", ".join(f"{place} {size / 1e6:,.0f} MB" for place, size in self.peak_memory_bytes.items())
        saved = "" if self.checkpoint_bytes is None else f"; a checkpoint {self.checkpoint_bytes / 1e6:,.1f} MB"
        return f"peak memory: {memory}; heads {self.heads_bytes / 1e6:,.1f} MB{saved}"


def provenance(run: LoadedRun, max_steps: int) -> dict[str, object]:
    """The origin of a run's heads: command, recipe, data, backbone and versions of packages."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "config": run.config.model_dump(),
        "data": run.dataset.counts.to_dict(),
        "backbone": run.heads.config.backbone,
        "max_steps": max_steps,
        "versions": {name: version(name) for name in PACKAGES},
    }


def draw_curves(log: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw the loss and each head's top-1 by step, from the log of a run, into a PNG file."""
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
