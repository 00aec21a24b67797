"""A transformers `Trainer` that fits heads on a frozen backbone and saves only heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback

from medusa.backbone import Backbone
from medusa.checkpoint import load_heads, save_heads
from medusa.errors import RequestError
from medusa.heads import MedusaHeads
from train.labels import IGNORE, head_labels, label_counts
from train.loss import HeadLosses, backbone_choices, head_losses, head_weights, weighted
from train.progress import ProgressBar
from train.resume import LogBeforeSaving

OBJECTIVES = ("text", "argmax")
PROBE_STEPS = 3  # timed training steps from which the length of a run with a time budget is guessed
MARGIN = 5  # a budget ends a run by the clock; its guessed number of steps must not, however slow the probe was


@dataclass
class MedusaTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with our defaults, and what heads need beyond them."""

    objective: str = field(
        default="argmax",
        metadata={
            "help": "what a head is taught at a position: text (the token that stands there) or argmax (the token that "
            "the backbone itself finds most probable there; what greedy acceptance compares with)"
        },
    )
    head_decay: float = field(default=0.8, metadata={"help": "loss weight of head k is head_decay^k (paper, 2.2.1)"})
    log_lines: bool = field(default=True, metadata={"help": "print every line of the log, not only the bar"})
    max_minutes: float | None = field(
        default=None, metadata={"help": "train this long; sets max_steps, and the learning rate falls with the clock"}
    )
    learning_rate: float = field(default=3e-3, metadata={"help": "peak; `medusa train` chooses it by the hidden size"})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "packed rows a step and device"})
    lr_scheduler_type: str = field(default="linear", metadata={"help": "fall of the learning rate"})
    warmup_steps: float = field(default=0.02, metadata={"help": "steps, or below 1 the share of the run"})
    adam_beta2: float = field(default=0.95, metadata={"help": "shorter memory than 0.999: runs are short"})
    logging_steps: float = field(default=20, metadata={"help": "steps between lines of the log"})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints kept"})
    report_to: str | list[str] | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ..."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "our rows hold what the loss reads"})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "all heads learn in every step"})
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "a resumed run has the time left that it had"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise RequestError(f"training.objective is {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise RequestError(f"training.max_minutes is {self.max_minutes}; it must be above 0")
        if not 0 < self.head_decay <= 1:
            raise RequestError(f"training.head_decay is {self.head_decay}; it must be above 0 and at most 1")


class HeadsOnBackbone(nn.Module):
    """What the Trainer trains: heads as parameters, the backbone beside them.

    The backbone stays outside the module tree, so that parameters, state dict, optimiser and checkpoints are the
    heads' alone.
    """

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, objective: str) -> None:
        super().__init__()
        self.heads, self.objective = heads, objective
        if getattr(model, "hf_device_map", None):  # spread over devices: the Trainer then leaves heads in their place
            self.hf_device_map = model.hf_device_map
        self._outside = (Backbone(model.requires_grad_(False).eval()),)  # a tuple: no submodule

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        hidden: Tensor | None = None,
    ) -> HeadLosses:
        """ids, positions, documents and mask, all [B, T] -> losses of the heads.

        `hidden` [B, T, H] is what the backbone says about them, where that is known already.
        """
        backbone = self._outside[0]
        with torch.no_grad():
            if hidden is None:
                hidden = backbone.hidden_states(input_ids, position_ids=position_ids, use_cache=False)
        hidden = hidden.to(backbone.dtype)  # may carry gradients
        with torch.no_grad():
            tokens = input_ids if self.objective == "text" else backbone_choices(backbone, hidden, input_ids)
        labels = head_labels(tokens, loss_mask, document_ids, self.heads.config.num_heads).flatten(1)
        taught = (labels[0] != IGNORE).nonzero()[:, 0]  # head 0 reaches least far: where it has no label, none has
        hidden = hidden.flatten(0, 1)[taught].to(next(self.heads.parameters()).dtype)
        return head_losses(self.heads, hidden, labels[:, taught], backbone.head)


class MedusaTrainer(Trainer):
    """Trains heads (Medusa-1): loss per head, weighted; checkpoints are folders of heads that anything here loads."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads,
        args: MedusaTrainingArguments,
        provenance: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """`provenance` is written beside the heads: where they come from; `kwargs` are the Trainer's."""
        self.heads, self.provenance, self.minutes = heads, dict(provenance or {}), args.max_minutes
        budget = None if args.max_minutes is None else TimeBudget(60 * args.max_minutes)
        callbacks = [*kwargs.pop("callbacks", []), LogBeforeSaving(), *([budget] if budget else [])]
        self.trained = self.assemble(heads, model, args)
        super().__init__(model=self.trained, args=args, callbacks=callbacks, **kwargs)
        for noisy in (PrinterCallback, ProgressCallback):  # they write to standard output, which is for results
            self.remove_callback(noisy)
        if not args.disable_tqdm:
            self.add_callback(ProgressBar(args.log_lines, lambda: self.budget))
        self.model_accepts_loss_kwargs = False  # or the Trainer would count labels its own way
        self.loss_is_scaled_for_ga = True  # see share
        self.weights = head_weights(heads.config.num_heads, args.head_decay)
        self._seen: dict[str, list[Tensor]] = {}
        self.reading_seconds = 0.0  # waited for batches
        foreign = [n for n, p in self.trained.named_parameters() if p.requires_grad and not self.is_ours(n)]
        if foreign:
            raise RuntimeError(f"only heads may be trained, not {foreign[0]}")

    def assemble(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> HeadsOnBackbone:
        """The module to train."""
        return HeadsOnBackbone(heads, model, args.objective)

    def is_ours(self, parameter: str) -> bool:
        """Whether a parameter of this name may be trained."""
        return parameter.startswith("heads.")

    @property
    def backbone(self) -> Backbone:
        """The frozen backbone."""
        return self.trained._outside[0]

    @property
    def budget(self) -> TimeBudget | None:
        """The time budget in force: on resuming, the Trainer puts another object in the place of ours."""
        found = [c for c in self.callback_handler.callbacks if isinstance(c, TimeBudget)]
        if found and self.minutes is not None:  # a longer budget may be asked for on resuming
            found[0].seconds = 60 * self.minutes
        return found[0] if found else None

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of one optimiser step, and how many labels are in all of them on all processes."""
        start = time.perf_counter()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.reading_seconds += time.perf_counter() - start
        counts = torch.stack([self.label_counts(batch) for batch in batches]).sum(0).to(device)
        return batches, self.accelerator.reduce(counts, "sum")

    def label_counts(self, batch: dict[str, Tensor]) -> Tensor:
        """How many labels each head has in a batch [K]."""
        return label_counts(batch["input_ids"], batch["loss_mask"], batch["document_ids"], self.heads.config.num_heads)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        losses = model(**inputs)
        split = "train" if model.training else "eval"
        self._seen.setdefault(split, []).append(
            torch.stack([losses.loss.detach() * losses.total, losses.correct, losses.total]).double().cpu()
        )
        loss = self.total_loss(losses, num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None)
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def total_loss(self, losses: HeadLosses, of_step: Tensor | None) -> Tensor:
        """What is minimised: the heads' mean losses, weighted. `of_step`: how many labels the whole step has [K]."""
        return weighted(losses.loss * self.share(losses.total, of_step), self.weights)

    def share(self, labels: Tensor, of_step: Tensor | None) -> Tensor | float:
        """What a micro-batch's mean counts for in the mean over all labels of an optimiser step.

        Micro-batches are added up, and processes averaged: so the loss and its gradients are those of one process with
        one batch, whatever number of labels falls on which.
        """
        if of_step is None:  # in evaluation every batch stands for itself
            return 1.0
        return labels * self.args.world_size / of_step.clamp_min(1)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)).detach(), None, None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each head's loss (nats) and top-1, over all labels since the last line, to whatever is logged."""
        split = "eval" if any(key.startswith("eval_") for key in logs) else "train"
        if split in self._seen and ("loss" in logs or "eval_loss" in logs):
            seen = torch.stack(self._seen.pop(split)).sum(0)
            loss, correct, count = self.accelerator.reduce(seen.to(self.args.device), "sum").cpu()
            prefix = "eval_" if split == "eval" else ""
            for head in range(len(count)):
                labels = max(float(count[head]), 1.0)
                logs[f"{prefix}head{head + 1}_loss"] = round(float(loss[head]) / labels, 4)
                logs[f"{prefix}head{head + 1}_top1"] = round(float(correct[head]) / labels, 4)
        super().log(logs, start_time)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        if self.budget is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        steps = self.args.warmup_steps
        warmup = steps if steps < 1 else min(1.0, steps * MARGIN / num_training_steps)
        self.lr_scheduler = LambdaLR(
            optimizer or self.optimizer,  # type: ignore[arg-type]
            lambda step: self.budget.learning_rate_factor(warmup),  # type: ignore[union-attr]
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def fit_budget(self) -> None:
        """Set `max_steps` beyond what the time budget can hold, by a few steps on a copy of the heads."""
        if self.budget is None:
            return
        seconds = broadcast_object_list([self.seconds_per_step()])[0]
        self.args.max_steps = max(1, int(MARGIN * self.budget.seconds / seconds))

    def seconds_per_step(self, prepare: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> float:
        """A training step by the clock, on heads that are left as they were; what `prepare` does is not timed."""
        learning = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in learning]
        rng = torch.get_rng_state()
        batches = iter(self.get_train_dataloader())
        optimizer = torch.optim.AdamW(learning, lr=1e-4)
        times = []
        for batch in [next(batches, None) for _ in range(PROBE_STEPS + 1)]:
            if batch is None:
                break
            inputs = prepare(self._prepare_inputs(batch))
            start = time.perf_counter()
            self.compute_loss(self.trained, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        for parameter, old in zip(learning, before, strict=True):
            parameter.data.copy_(old)
        torch.set_rng_state(rng)
        self._seen.clear()  # and the transfer of its figures has waited for the device
        return min(times) * self.args.gradient_accumulation_steps  # the first one also warms caches up

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; a run that is shorter than a line of the log gives one at its end."""
        if self.args.max_steps < 0:  # a limit that was asked for stands beside the budget
            self.fit_budget()
        outcome = super().train(*args, **kwargs)
        if self._seen.get("train"):
            self.log({"loss": outcome.training_loss})
        return outcome

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            save_heads(self.heads, output_dir or str(self.args.output_dir), self.provenance)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # trainer_state.json, which comes next, says that the checkpoint is whole

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.heads.load_state_dict(load_heads(resume_from_checkpoint).state_dict())


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after `seconds`, and says how far the learning rate is to have fallen by now."""

    def __init__(self, seconds: float, elapsed: float = 0.0) -> None:
        self.seconds, self.elapsed = seconds, elapsed
        self._resumed_at: float | None = None
        self._agreed: float | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {"seconds": self.seconds}, "attributes": {"elapsed": self.spent()}}

    def spent(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.elapsed + (0.0 if self._resumed_at is None else time.monotonic() - self._resumed_at)

    def now(self) -> float:
        """Seconds spent, the same on all processes."""
        return self.spent() if self._agreed is None else self._agreed

    def learning_rate_factor(self, warmup: float) -> float:
        """Linear warm-up over that share of the budget, then linear to 0, by the clock."""
        progress = self.now() / self.seconds
        if not progress:
            return 1e-3  # the first step comes before the clock has moved
        return min(progress / warmup if warmup else 1.0, max(0.0, 1.0 - progress) / max(1e-9, 1.0 - warmup))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._resumed_at = time.monotonic()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size > 1:  # one clock for all, or learning rates would differ, and one process would stop early
            self._agreed = broadcast_object_list([self.spent()])[0]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.now() >= self.seconds:
            control.should_training_stop = True
