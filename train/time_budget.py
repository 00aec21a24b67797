"""A time budget: it ends a run by the clock, and the learning rate falls with the time that is spent."""

from __future__ import annotations

import time
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after `seconds`; its checkpoints hold the time spent, so a resumed run has the rest."""

    def __init__(self, seconds: float, elapsed: float = 0.0, cpu: bool = False) -> None:
        """
        Args:
            seconds: of training.
            elapsed: seconds of these that an interrupted run has spent.
            cpu: count this process's CPU time instead of the clock's.
        """
        self.seconds, self.elapsed, self.cpu = seconds, elapsed, cpu
        self._resumed_at: float | None = None
        self._agreed: float | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"args": {"seconds": self.seconds, "cpu": self.cpu}, "attributes": {"elapsed": self.spent()}}

    def spent(self) -> float:
        """Seconds of training so far, including those before an interruption."""
        return self.elapsed + (0.0 if self._resumed_at is None else self._clock() - self._resumed_at)

    def _clock(self) -> float:
        return time.process_time() if self.cpu else time.monotonic()

    def agreed(self) -> float:
        """Seconds spent, the same number on all processes."""
        return self.spent() if self._agreed is None else self._agreed

    def progress(self) -> float:
        """Share of the budget that is spent, at most 1."""
        return min(1.0, self.agreed() / self.seconds)

    def learning_rate_factor(self, warmup: float) -> float:
        """The learning rate now as a share of its peak: a linear rise over the share `warmup`, then a linear fall."""
        progress = self.agreed() / self.seconds
        if not progress:
            return 1e-3  # the first step is taken before the clock has moved
        return min(progress / warmup if warmup else 1.0, max(0.0, 1.0 - progress) / max(1e-9, 1.0 - warmup))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._resumed_at = self._clock()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        # One clock for all processes: otherwise learning rates would differ, and one process would stop early.
        if args.world_size > 1:
            self._agreed = broadcast_object_list([self.spent()])[0]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.agreed() >= self.seconds:
            control.should_training_stop = True
