"""The metrics of a finished training run: time, loss, memory, file sizes and accuracies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medusa.memory import bytes_of, peak_memory
from train.callbacks import top1_shares
from train.checkpoints import size_on_disk, whole_checkpoints
from train.medusa2.perplexity import Perplexities
from train.trainer import MedusaTrainer


@dataclass(frozen=True)
class RunFigures:
    """The metrics of a finished training run: loss, accuracies, time, memory and file sizes."""

    steps: int
    seconds: float | None
    loss: float | None
    """Mean of the training loss over the run."""
    reading_share: float
    """Share of the training time that was spent waiting for data."""
    peak_memory_bytes: dict[str, int]
    """Peak memory in bytes of the process and of each GPU, by name (`medusa.memory`)."""
    heads_bytes: int
    checkpoint_bytes: int | None
    """Size of the last checkpoint, which also holds the state of the optimiser: about three times the heads' size.
    `None` if the run has written no checkpoint."""
    heads: dict[str, float]
    """Each head's loss and top-1 accuracy in the last line of the log: `head1_loss`, `head1_top1`, ... ."""
    perplexities: Perplexities | None
    """Perplexities of an adapted backbone before and after training; `None` without an adapter."""

    @classmethod
    def of(cls, trainer: MedusaTrainer, metrics: dict[str, float], perplexities: Perplexities | None) -> RunFigures:
        """Collect the metrics of a finished run from its trainer and from the `metrics` that training returned."""
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
            perplexities=perplexities,
        )

    @property
    def top1(self) -> list[float]:
        """Top-1 accuracy of each head in the log's last line: the share of labels that equal the head's best guess."""
        return top1_shares(self.heads)

    def to_dict(self) -> dict[str, object]:
        """The metrics as one flat JSON object."""
        figures = {name: value for name, value in vars(self).items() if name not in ("heads", "perplexities")}
        if self.perplexities is not None:
            figures |= {"perplexity_before": self.perplexities.before, "perplexity_after": self.perplexities.after}
        return figures | self.heads

    def __str__(self) -> str:
        memory = ", ".join(f"{place} {size / 1e6:,.0f} MB" for place, size in self.peak_memory_bytes.items())
        saved = "" if self.checkpoint_bytes is None else f"; a checkpoint {self.checkpoint_bytes / 1e6:,.1f} MB"
        return f"peak memory: {memory}; heads {self.heads_bytes / 1e6:,.1f} MB{saved}"
