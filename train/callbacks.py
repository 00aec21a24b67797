"""Trainer callbacks: one shows a progress bar, and one writes a line of the training log at each checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.time_budget import TimeBudget


def say(message: str) -> None:
    """Print a message on standard error. If several processes train, only the first one prints it."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)


class LogBeforeSaving(TrainerCallback):
    """Callback that writes a line of the log at every checkpoint, so that resumed and uninterrupted runs log the same.

    A line of the log shows means of losses and accuracies over the steps since the line before, and a checkpoint does
    not store their sums. If a run resumed between two lines, the next means would lack the steps before the checkpoint.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_log = control.should_log or control.should_save

    on_epoch_end = on_step_end


class ProgressBar(TrainerCallback):
    """Callback that shows a progress bar, which counts training steps or, with a time budget, seconds."""

    def __init__(self, lines: bool = True, budget: Callable[[], TimeBudget | None] = lambda: None) -> None:
        """Make a progress bar; it appears when training begins.

        Args:
            lines: print every line of the log above the bar; otherwise only the bar shows the latest metrics.
            budget: function that returns the time budget of the run, or `None` if there is none.
        """
        self.lines, self._budget = lines, budget
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        if not state.is_local_process_zero:
            return
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.progress = Progress(TextColumn("training"), BarColumn(), *columns, console=Console(stderr=True))
        budget = self._budget()
        self.task = self.progress.add_task("", total=round(budget.seconds) if budget else state.max_steps)
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.progress is not None:
            budget = self._budget()
            self.progress.update(self.task, completed=round(budget.spent()) if budget else state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **_: object,
    ) -> None:
        if self.progress is None or not logs or not ("loss" in logs or "eval_loss" in logs):
            return
        summary = summarize(logs)
        if not self.lines:
            self.progress.update(self.task, description=summary)
        else:
            rate = f"  lr {logs['learning_rate']:.1e}" if "learning_rate" in logs else ""
            self.progress.console.print(f"step {state.global_step:>6}  {summary}{rate}", highlight=False)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def top1_shares(logs: Mapping[str, float], prefix: str = "") -> list[float]:
    """Top-1 accuracy of each head in a line of the log: the share of labels that equal the head's best guess.

    The metrics' names start with `prefix`, which is "eval_" for an evaluation.
    """
    shares: list[float] = []
    while (share := logs.get(f"{prefix}head{len(shares) + 1}_top1")) is not None:
        shares.append(share)
    return shares


def summarize(logs: Mapping[str, float]) -> str:
    """Summarize a line of the log in one line of text: the weighted loss in nats and each head's top-1 accuracy.

    The text of an evaluation also has the expected tau (tokens per decoding step), and that of Medusa-2 the LM loss.
    """
    prefix = "eval_" if "eval_loss" in logs else ""
    shares = [f"{share:.3f}" for share in top1_shares(logs, prefix)]
    tau = f"  tau {logs['eval_tau']:.3f}" if "eval_tau" in logs else ""
    lm = f"  lm {logs['lm_loss']:.4f}" if "lm_loss" in logs else ""
    return f"{prefix}loss {logs[prefix + 'loss']:.3f}  top-1 {' '.join(shares)}{tau}{lm}"
