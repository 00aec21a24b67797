"""A transformers `Trainer` whose runs can end at any step and continue there: on a signal, or suddenly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa.errors import Interrupted
from medusa.interruptions import Signals
from train.arguments import MedusaTrainingArguments
from train.checkpoints import RESCUE, remove_rescues

SAVE_TIMES = 20  # a run spends at most about 5 % of its time on rescue checkpoints


class RescueClock:
    """Clock that says when the next rescue checkpoint is due."""

    def __init__(self, minutes: float) -> None:
        """Make a clock for a checkpoint every `minutes`, or less often if saving is slow; 0: none is ever due."""
        self.minutes, self.save_seconds = minutes, 0.0
        self._last = time.monotonic()

    def start(self) -> None:
        self._last = time.monotonic()

    def saved(self, seconds: float) -> None:
        """Start again after a save, which took so many seconds."""
        self.save_seconds, self._last = seconds, time.monotonic()

    @property
    def interval(self) -> float:
        """Seconds between two checkpoints: `minutes`, or `SAVE_TIMES` times the last save if that is longer."""
        return max(60 * self.minutes, SAVE_TIMES * self.save_seconds)

    def due(self) -> bool:
        return self.minutes > 0 and time.monotonic() - self._last >= self.interval


class InterruptibleTrainer(Trainer):
    """A Trainer that saves rescue checkpoints by the clock, and on a signal ends after the running step.

    A rescue checkpoint is in the folder `RESCUE`, where it does not count in `save_total_limit`. The next checkpoint
    of either kind replaces it. It always holds the optimiser's state."""

    args: MedusaTrainingArguments
    signals: Signals | None = None  # of the run that this trainer belongs to; `None`: signals act as usual

    def __init__(self, model: nn.Module, args: MedusaTrainingArguments, **options: Any) -> None:
        self.clock = RescueClock(args.save_minutes)
        self._rescuing, self._saved_step = False, -1
        super().__init__(model, args, **options)

    def end_if_interrupted(self) -> None:
        """Save what the clock or a signal asks for. After a signal to any process, raise `Interrupted` in all of them.

        Call it between two steps, in all processes."""
        number, due = self._agreed(self.signals.number if self.signals else 0, self.clock.due())
        if number or due:
            self.save_rescue()
        if number:
            self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
            raise Interrupted(number, f"saved {self._checkpoint(self._saved_in)}")

    def save_rescue(self) -> None:
        """Save a rescue checkpoint, unless a checkpoint of this step can be resumed already."""
        if self._saved_step == self.state.global_step:
            return
        only, self.args.save_only_model, self._rescuing = self.args.save_only_model, False, True
        try:
            self._save_checkpoint(self.model_wrapped, None)
        finally:
            self.args.save_only_model, self._rescuing = only, False

    def _agreed(self, *numbers: float) -> list[int]:
        if self.args.world_size == 1:
            return [int(number) for number in numbers]
        everywhere = self.accelerator.gather(torch.tensor([numbers], dtype=torch.long, device=self.args.device))
        return [int(number) for number in everywhere.amax(0)]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.end_if_interrupted()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        start, folder = time.monotonic(), self._get_output_dir(trial)
        checkpoint = self._checkpoint(folder)
        if self.args.should_save:  # until the new state is written, a checkpoint that is written again is incomplete
            (checkpoint / TRAINER_STATE_NAME).unlink(missing_ok=True)
        super()._save_checkpoint(model, trial)
        if not self.args.save_only_model:
            self._saved_step, self._saved_in = self.state.global_step, folder
            if self.args.should_save:
                remove_rescues(Path(str(self.args.output_dir)), checkpoint)
        self.clock.saved(time.monotonic() - start)

    def _checkpoint(self, folder: str) -> Path:
        return Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return str(Path(folder) / RESCUE) if self._rescuing else folder
