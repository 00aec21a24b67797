"""What a run reports on standard error: a progress bar, a line of figures now and then, and messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from train.time_budget import TimeBudget


def say(message: str) -> None:
    """Print a message on standard error; of several processes, the first one speaks for all."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)


class ProgressBar(TrainerCallback):
    """A bar that counts steps or, with a time budget, seconds."""

    def __init__(self, lines: bool = True, budget: Callable[[], TimeBudget | None] = lambda: None) -> None:
        """`lines`: print every line of the log above the bar, instead of the latest figures next to it."""
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
        logs: Mapping[str, Any] | None = None,
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


def summarize(logs: Mapping[str, Any]) -> str:
    """One line of the log: the weighted loss, and how often each head's best guess is right."""
    prefix = "eval_" if "eval_loss" in logs else ""
    shares: list[str] = []
    while (share := logs.get(f"{prefix}head{len(shares) + 1}_top1")) is not None:
        shares.append(f"{share:.3f}")
    tau = f"  tau {logs['eval_tau']:.3f}" if "eval_tau" in logs else ""
    lm = f"  lm {logs['lm_loss']:.4f}" if "lm_loss" in logs else ""  # how far Medusa-2's backbone has moved
    return f"{prefix}loss {logs[prefix + 'loss']:.3f}  top-1 {' '.join(shares)}{tau}{lm}"
