"""A time budget for training: the run ends by the clock, and the learning rate follows the clock."""

from __future__ import annotations

import time
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class TimeBudget(TrainerCallback, ExportableState):
    """Callback that ends training after `seconds`, and computes a learning rate factor that falls with the time spent.

    Checkpoints store the time spent, so a resumed run continues with the rest of the budget.
    """

    def __init__(self, seconds: float, elapsed: float = 0.0, cpu: bool = False) -> None:
        """Make a time budget whose clock starts when training begins.

        Args:
            seconds: time for the whole training.
            elapsed: seconds that an interrupted run has already spent.
            cpu: count the CPU time of this process instead of wall-clock time.
        """
        self.seconds, self.elapsed, self.cpu = seconds, elapsed, cpu
        self._clock = time.process_time if cpu else time.monotonic
        self._resumed_at: float | None = None
        self._agreed: float | None = None

    def state(self) -> dict[str, Any]:
        """The state to store in a checkpoint, in the form from which transformers restores a callback."""
        return {"args": {"seconds": self.seconds, "cpu": self.cpu}, "attributes": {"elapsed": self.spent()}}

    def spent(self) -> float:
        """Seconds of training so far in this process, including the time before an interruption."""
        return self.elapsed + (0.0 if self._resumed_at is None else self._clock() - self._resumed_at)

    def agreed(self) -> float:
        """Seconds of training so far as the first process measures them, so that all processes use the same clock."""
        return self.spent() if self._agreed is None else self._agreed

    def progress(self) -> float:
        """Share of the time budget that is spent, from 0 to 1."""
        return min(1.0, self.agreed() / self.seconds)

    def learning_rate_factor(self, warmup: float) -> float:
        """The current learning rate as a share of its peak.

        This factor rises linearly over the first share `warmup` of the budget, and then falls linearly to 0.
        """
        progress = self.agreed() / self.seconds
        if not progress:
            return 1e-3  # before the first step the clock stands at 0; a rate of 0 would waste that step
        return min(progress / warmup if warmup else 1.0, max(0.0, 1.0 - progress) / max(1e-9, 1.0 - warmup))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        self._resumed_at = self._clock()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        # All processes use the same clock; otherwise learning rates would differ, and one process would stop early.
        if args.world_size > 1:
            self._agreed = broadcast_object_list([self.spent()])[0]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.agreed() >= self.seconds:
            control.should_training_stop = True
