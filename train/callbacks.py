"""Trainer callbacks: the progress bar, the sums of a line of the log, and the time budget of a run."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

import torch
from accelerate.utils import broadcast_object_list
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from medusa.progress import ProgressLines


def say(message: str) -> None:
    """Print a message on standard error. If several processes train, only the first one prints it."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)


class LogSums(TrainerCallback, ExportableState):
    """Callback with the sums since the last line of the log, which checkpoints store for a resumed run."""

    def __init__(self, stored: list[float] | None = None) -> None:
        """Make empty sums, or those over all processes that a checkpoint has stored."""
        self.sums: Tensor | None = None
        self.stored = stored  # by the next checkpoint

    def state(self) -> dict[str, dict[str, object]]:
        return {"args": {"stored": self.stored}, "attributes": {}}

    def add(self, *numbers: Tensor) -> None:
        """Add tensors of numbers to the sums, each element to its own, on the CPU and in float64."""
        new = torch.cat([number.detach().double().reshape(-1).cpu() for number in numbers])
        self.sums = new if self.sums is None else self.sums + new

    def take(self) -> Tensor | None:
        """Return the sums and reset them; `None` if nothing was added."""
        sums, self.sums = self.sums, None
        return sums

    def on_train_begin(self, args: TrainingArguments, *_: object, **__: object) -> None:
        if self.stored is not None:  # each process takes an equal part, because the sums over all will be logged
            self.sums, self.stored = torch.tensor(self.stored, dtype=torch.float64) / args.world_size, None


class TimeBudget(TrainerCallback, ExportableState):
    """Callback that ends training after a given time; the learning rate rises and falls with the time spent."""

    def __init__(self, seconds: float, elapsed: float = 0.0, cpu: bool = False) -> None:
        """Make a budget of which `elapsed` seconds are spent; with `cpu`, its clock is this process's CPU time."""
        self.seconds, self.elapsed, self.cpu = seconds, elapsed, cpu
        self.clock = time.process_time if cpu else time.monotonic
        self._resumed_at: float | None = None
        self._agreed: float | None = None

    def state(self) -> dict[str, dict[str, object]]:
        return {"args": {"seconds": self.seconds, "cpu": self.cpu}, "attributes": {"elapsed": self.spent()}}

    def spent(self) -> float:
        """Seconds of training so far by this process's clock, also before an interruption."""
        return self.elapsed + (0.0 if self._resumed_at is None else self.clock() - self._resumed_at)

    def agreed(self) -> float:
        """Seconds of training so far as the first process measures them, so that all processes use the same clock."""
        return self.spent() if self._agreed is None else self._agreed

    def progress(self) -> float:
        """Share of the time budget that is spent, from 0 to 1."""
        return min(1.0, self.agreed() / self.seconds)

    def learning_rate_factor(self, warmup: float) -> float:
        """Share of the peak learning rate: it rises in the first part `warmup` (0 to 1) of the time, then falls."""
        progress = self.agreed() / self.seconds
        if not progress:
            return 1e-3  # before the first step the clock stands at 0; a rate of 0 would waste that step
        return min(progress / warmup if warmup else 1.0, max(0.0, 1.0 - progress) / max(1e-9, 1.0 - warmup))

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._resumed_at = self.clock()

    def on_optimizer_step(self, args: TrainingArguments, *_: object, **__: object) -> None:
        if args.world_size > 1:
            self._agreed = broadcast_object_list([self.spent()])[0]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.agreed() >= self.seconds:
            control.should_training_stop = True


class ProgressBar(TrainerCallback):
    """Callback that shows a progress bar, which counts training steps or, with a time budget, seconds."""

    def __init__(self, lines: bool = True, budget: Callable[[], TimeBudget | None] = lambda: None) -> None:
        """Make a bar for a run with this `budget`. With `lines`, all lines are printed, else the latest is shown."""
        self.lines, self._budget = lines, budget
        self.progress: ProgressLines | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if not state.is_local_process_zero:
            return
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.progress = ProgressLines(TextColumn("training"), BarColumn(), *columns, title="training")
        budget = self._budget()
        self.task = self.progress.add_task("", total=round(budget.seconds) if budget else state.max_steps)
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self.progress is not None:
            budget = self._budget()
            self.progress.update(self.task, completed=round(budget.spent()) if budget else state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        logs = state.log_history[-1]
        if self.progress is None or not ("loss" in logs or "eval_loss" in logs):
            return
        summary = summarize(logs)
        if not self.lines:
            self.progress.update(self.task, description=summary)
        else:
            rate = f"  lr {logs['learning_rate']:.1e}" if "learning_rate" in logs else ""
            self.progress.console.print(f"step {state.global_step:>6}  {summary}{rate}", highlight=False)

    def on_train_end(self, *_: object, **__: object) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None


def top1_shares(logs: Mapping[str, float], prefix: str = "") -> list[float]:
    """Top-1 accuracy, 0 to 1, of each head in a line of the log; `prefix` is "eval_" for an evaluation."""
    shares: list[float] = []
    while (share := logs.get(f"{prefix}head{len(shares) + 1}_top1")) is not None:
        shares.append(share)
    return shares


def summarize(logs: Mapping[str, float]) -> str:
    """Describe a line of the log in words."""
    prefix = "eval_" if "eval_loss" in logs else ""
    shares = [f"{share:.3f}" for share in top1_shares(logs, prefix)]
    tau = f"  tau {logs['eval_tau']:.3f}" if "eval_tau" in logs else ""
    lm = f"  lm {logs['lm_loss']:.4f}" if "lm_loss" in logs else ""
    return f"{prefix}loss {logs[prefix + 'loss']:.3f}  top-1 {' '.join(shares)}{tau}{lm}"
