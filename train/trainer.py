"""A transformers `Trainer` that trains heads on a frozen backbone and saves only the heads. Shapes: K heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from medusa.clocks import synchronize
from medusa.errors import RunError
from medusa.heads.independent import MedusaHeads
from medusa.tree import load_tree
from train.arguments import MedusaTrainingArguments
from train.callbacks import LogSums, ProgressBar, TimeBudget, say
from train.checkpoints import remove_rescues
from train.data.packing import Batch
from train.evaluate import GuessCounts, label_ranks
from train.loss.heads import HeadLosses
from train.loss.targets import IGNORE
from train.module import HeadsOnBackbone
from train.rescue import InterruptibleTrainer
from train.scales import even_steps, state_sizes

PROBE_STEPS = 3  # timed training steps, from which a time budget's number of steps is estimated
PROBE_SECONDS = 5.0  # after which no further batch is timed: steps of a large model on a CPU take half a minute
HYPERPARAMETERS = ("lr", "initial_lr", "weight_decay", "betas", "eps", "momentum", "alpha")
"""What a resumed run may change of an optimiser; other entries of its groups may be its state."""
MARGIN = 100  # max_steps is this many times the estimate, so that the clock ends the run and never max_steps


class MedusaTrainer(InterruptibleTrainer):
    """Trains heads on a frozen backbone (Medusa-1) with a weighted loss. Its checkpoints lack the backbone."""

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads,
        args: MedusaTrainingArguments,
        provenance: Mapping[str, object] | None = None,
        *,
        callbacks: list[TrainerCallback] | None = None,
        **options: Any,
    ) -> None:
        """Make a trainer, with any `options` of transformers'; `provenance` is saved with the heads."""
        self.heads, self.provenance = heads, dict(provenance or {})
        self.minutes = args.max_minutes or args.max_cpu_minutes
        callbacks = [*(callbacks or []), LogSums()]
        if args.early_stopping_patience is not None:
            callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
        if self.minutes:
            callbacks.append(TimeBudget(60 * self.minutes, cpu=args.max_cpu_minutes is not None))
        self.trained = self.assemble(heads, model, args)
        self.backbone = self.trained.backbone
        super().__init__(self.trained, args, callbacks=callbacks, **options)
        for noisy in (PrinterCallback, ProgressCallback):  # they print to stdout, which is for results
            self.remove_callback(noisy)
        if not args.disable_tqdm:
            self.add_callback(ProgressBar(args.log_lines, lambda: self.budget))
        self.model_accepts_loss_kwargs = False  # otherwise the Trainer would count labels by its own rule
        # The Trainer of transformers 5.17 sets this only when it begins an epoch.
        self.current_gradient_accumulation_steps = args.gradient_accumulation_steps
        self.loss_is_scaled_for_ga = True  # `compute_loss` scales it for gradient accumulation
        self._batch_sums = torch.zeros(3, heads.config.num_heads)  # of the last batch: losses, right guesses, labels
        self._evaluated: list[Tensor] = []  # the same of each batch of an evaluation
        self._objectives: list[Tensor] = []  # of each such batch: the loss times the number of labels, and this number
        self.eval_tree = load_tree(args.eval_tree, heads.config.num_heads).clip(heads.config.num_heads)
        self._guesses = GuessCounts(heads.config.num_heads, self.eval_tree)
        self._stepped = False  # whether training has begun a step
        self.reading_seconds = 0.0  # that training has spent waiting for batches

    def assemble(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> HeadsOnBackbone:
        """Make the module to train from the heads and the backbone."""
        return HeadsOnBackbone(heads, model, args)

    @property
    def budget(self) -> TimeBudget | None:
        """The callback with the time budget of the run, or `None` if the run has no time budget."""
        # Looked up at each call, because the Trainer replaces the callback object when a run resumes.
        found = next((c for c in self.callback_handler.callbacks if isinstance(c, TimeBudget)), None)
        if found is not None and self.minutes is not None:  # a resumed run may ask for a longer budget
            found.seconds = 60 * self.minutes
        return found

    @property
    def log_sums(self) -> LogSums:
        """The callback with the sums since the last line of the log."""
        return next(c for c in self.callback_handler.callbacks if isinstance(c, LogSums))  # looked up as in `budget`

    def progress(self) -> float:
        """Share of the run that is done, from 0 to 1."""
        if self.budget is not None:
            return self.budget.progress()
        return self.state.global_step / max(self.state.max_steps, 1)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train as `Trainer.train` does, and log the last steps, too. Raise `Interrupted` after a signal."""
        if self.args.max_steps < 0:  # a recipe's max_steps also holds with a budget
            path = resume_from_checkpoint
            if path is True:
                path = get_last_checkpoint(str(self.args.output_dir))
            self.fit_budget(TrainerState.load_from_json(f"{path}/{TRAINER_STATE_NAME}").global_step if path else 0)
        self._stepped = False
        self.clock.start()
        with self.even_steps():
            outcome = super().train(resume_from_checkpoint, *args, **kwargs)
        if not self._stepped and self.args.process_index == 0:
            where = f"step {self.state.global_step} of {self.state.max_steps}"
            say(f"nothing is left to train: the run has ended at {where}, by its steps, time or patience")
        if self.log_sums.sums is not None:
            self.log({"loss": 0.0})  # `log` replaces it by the loss of the last steps
        self.end_if_interrupted()
        if self.signals is None:
            remove_rescues(Path(str(self.args.output_dir)))
        self.heads.eval()  # dropout off, for decoding
        return outcome

    def even_steps(self) -> AbstractContextManager[None]:
        """The context in which heads of several layers learn from layers of all sizes alike (`train.scales`)."""
        if self.heads.config.feature_layers is None:
            return nullcontext()
        return even_steps(self.heads, state_sizes(self.backbone)[: self.heads.config.feature_size])

    def has_ended(self) -> bool:
        """Whether a run that has just been resumed had ended already: by its steps, its time or its patience."""
        early = [c for c in self.callback_handler.callbacks if isinstance(c, EarlyStoppingCallback)]
        for callback in early:  # a resumed run may ask for more patience
            callback.early_stopping_patience = self.args.early_stopping_patience or callback.early_stopping_patience
        impatient = any(c.early_stopping_patience_counter >= c.early_stopping_patience for c in early)
        spent = self.budget is not None and self.budget.elapsed >= self.budget.seconds
        return self.state.global_step >= self.state.max_steps or spent or impatient

    def fit_budget(self, done: int = 0) -> None:
        """With a time budget, set `max_steps` above the steps `done` and those that fit, so that the time ends it."""
        if self.budget is not None:
            seconds = broadcast_object_list([self.seconds_per_step()])[0]
            self.args.max_steps = done + max(1, int(MARGIN * self.budget.seconds / seconds))
            for name in ("logging_steps", "eval_steps", "save_steps"):  # shares of the run, not of `max_steps`
                share = getattr(self.args, name)
                if share is not None and share < 1:
                    setattr(self.args, name, max(1, round(share * (done + self.budget.seconds / seconds))))

    @property
    def probe_clock(self) -> Callable[[], float]:
        """The clock by which steps are timed: that of the time budget, if there is one."""
        return time.perf_counter if self.budget is None else self.budget.clock

    def seconds_per_step(self, prepare: Callable[[Batch], Batch] = dict) -> float:
        """Time a few training steps, undo them, and return seconds per step; `prepare` changes each batch, untimed.

        The clock is the budget's, as CPU time is a small part of the time on a busy machine. If the backbone's states
        are kept for later epochs, a step has the time of a later epoch."""
        learning = [parameter for parameter in self.trained.parameters() if parameter.requires_grad]
        before = [parameter.detach().to("cpu", copy=True) for parameter in learning]  # a GPU may have no room
        self.trained.scheduled_sampling = self.trained.args.scheduled_sampling  # its slowest value
        device, times = self.args.device, list[float]()
        clock = self.probe_clock
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            optimizer = torch.optim.AdamW(learning, lr=1e-4)
            for _, batch in zip(range(PROBE_STEPS + 1), self.get_train_dataloader(), strict=False):
                if self.args.world_size == 1 and len(times) > 1 and sum(times) > PROBE_SECONDS:
                    break  # several processes would have to agree on it
                inputs = prepare(self._prepare_inputs(batch))
                for _ in range(1 + self.trained.read.keeps):
                    synchronize(device)
                    start = clock()
                    self.compute_loss(self.trained, inputs).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    synchronize(device)
                    times.append(clock() - start)
        for parameter, old in zip(learning, before, strict=True):
            parameter.data.copy_(old)
        return min(times) * self.args.gradient_accumulation_steps  # min, because the first step is slow

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Create the learning rate scheduler; with a time budget, the rate depends on time, not steps."""
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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the state of the optimiser and the schedule, but keep the learning rate and the like of this run."""
        assert self.optimizer is not None
        asked = [{key: group[key] for key in HYPERPARAMETERS if key in group} for group in self.optimizer.param_groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        for group, own in zip(self.optimizer.param_groups, asked, strict=True):
            usual = group.get("initial_lr") or own["lr"]
            now = group["lr"] * (own.get("initial_lr", own["lr"]) / usual if usual else 1)
            group.update(own | {"lr": now})
        schedule = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        if isinstance(schedule, LRScheduler):
            schedule.base_lrs = [own.get("initial_lr", own["lr"]) for own in asked]

    def begin_step(self, progress: float) -> None:
        """Set what changes over the run, such as scheduled sampling, before a step; `progress` rises from 0 to 1."""
        self.trained.scheduled_sampling = self.trained.args.scheduled_sampling * progress

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Tensor | int | None]:
        """Return the batches of an optimiser step with labels, and the number of each head's [K], over all processes.

        There are none if the run had ended before it was resumed."""
        first, self._stepped = not self._stepped, True
        if first and self.has_ended():
            self._stepped = False
            self.control = TrainerControl(should_training_stop=True)
            return [], None
        self.begin_step(self.progress())
        start = time.perf_counter()
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.reading_seconds += time.perf_counter() - start
        batches = [self.trained.with_labels(batch) for batch in batches]
        counts = torch.stack([self.trained.label_counts(batch) for batch in batches]).sum(0).to(device)
        return batches, self.accelerator.reduce(counts, "sum")

    @property
    def adds_in_place(self) -> bool:
        """Whether the loss can add to the gradients itself, because nothing else scales them or adds them up."""
        alone = self.accelerator.distributed_type == DistributedType.NO and self.accelerator.scaler is None
        return alone and not self.args.torch_compile

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Compute the loss of a batch, and keep each head's loss and number of right guesses for the log.

        `num_items_in_batch` [K] is the number of labels of each head in the optimiser step, over all processes. Returns
        the loss, scaled as the Trainer expects it, and with `return_outputs` also a dict with it."""
        counts = num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None  # None: steps that are timed
        losses: HeadLosses = model(**inputs, counts=counts, in_place=counts is not None and self.adds_in_place)
        self._batch_sums = losses.sums.detach()
        # The Trainer adds up the losses of micro-batches and averages those of processes. One without
        # `loss_is_scaled_for_ga` (5.17) always divides by the number of micro-batches.
        undone = 1 if hasattr(Trainer, "loss_is_scaled_for_ga") else self.current_gradient_accumulation_steps
        loss = losses.objective if counts is None else losses.objective * (self.args.world_size * undone)
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def training_step(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the gradients of a batch, return its detached loss, and add its figures to the sums for the log."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        step = torch.tensor(1 / self.current_gradient_accumulation_steps)  # the batch's share of an optimiser step
        logged = loss
        if self.args.logging_nan_inf_filter and not loss.isfinite():
            sums = self.log_sums.sums
            logged = torch.zeros(()) if sums is None else sums[0] / sums[1] * step
        self.log_sums.add(logged, step, self._batch_sums)
        return loss

    @torch.no_grad()
    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Compute the loss of an evaluation batch, and count how often the heads' guesses are right."""
        batch = self._without_repeats(self.trained.with_labels(self._prepare_inputs(inputs)))
        found = self.trained.labelled_positions(**batch)  # for the ranks, as in decoding
        with self.accelerator.autocast():
            losses = self.trained.losses(found)
        self._guesses.add(label_ranks(self.backbone, self.heads, found.inputs, found.labels), found.labels != IGNORE)
        self._evaluated.append(losses.sums.double().cpu())
        labels = losses.total.sum().double().cpu()
        self._objectives.append(torch.stack([losses.objective.double().cpu() * labels, labels]))
        return losses.objective, None, None

    def _without_repeats(self, batch: Batch) -> Batch:
        """Take the labels off rows with which several processes fill up their last batches, as other batches have them.

        Rows stay, as all processes must run the same forwards."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch
        rows, tokens = batch["input_ids"].shape
        kept = max(state.remainder - rows * self.accelerator.process_index, 0)
        seen = batch["places"] < kept * tokens
        return batch | {"labels": batch["labels"].where(seen, IGNORE)}

    def _guess_figures(self) -> dict[str, float]:
        guesses, self._guesses = self._guesses, GuessCounts(self.heads.config.num_heads, self.eval_tree)
        guesses.reduce(lambda sums: self.accelerator.reduce(sums.to(self.args.device), "sum").cpu())
        figures = {"eval_tau": round(guesses.expected_tau, 4)}
        for head in guesses.figures():
            name = f"eval_head{head.head}"
            figures |= {f"{name}_top{top}": share for top, share in head.top.items()}
            figures[f"{name}_conditional"] = head.conditional_top1
        return figures

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a line of the log, with each head's loss and accuracy, and after an evaluation the expected tau."""
        if "eval_loss" in logs and self._evaluated:
            sums, self._evaluated = torch.stack(self._evaluated).sum(0), []
            objectives, self._objectives = torch.stack(self._objectives).sum(0), []
            loss, labels = self._over_processes(objectives)
            logs["eval_loss"] = (loss / labels.clamp_min(1)).item()  # the Trainer's own mean is over batches
            logs |= self.figures(self._over_processes(sums), "eval_") | self._guess_figures()
        elif "loss" in logs and (taken := self.log_sums.take()) is not None:
            loss, steps, *_ = sums = self._over_processes(taken)
            logs |= {"loss": (loss / steps).item()} | self.figures(sums[2:].view(3 + self.heads.is_confident, -1), "")
        super().log(logs, start_time)

    def _over_processes(self, sums: Tensor) -> Tensor:
        return self.accelerator.reduce(sums.to(self.args.device), "sum").cpu()

    def figures(self, sums: Tensor, prefix: str) -> dict[str, float]:
        """Mean losses and top-1 accuracy of K heads for the log, from `HeadLosses.sums`."""
        figures = {}
        for head, (loss, correct, count, *confidence) in enumerate(sums.T.tolist(), 1):
            figures[f"{prefix}head{head}_loss"] = round(loss / max(count, 1.0), 4)
            figures[f"{prefix}head{head}_top1"] = round(correct / max(count, 1.0), 4)
            for sure in confidence:
                figures[f"{prefix}head{head}_confidence_loss"] = round(sure / max(count, 1.0), 4)
        return figures

    def require_finite(self) -> None:
        """Raise RunError if a weight that learns is NaN or infinite."""
        for parameter in self.trained.parameters():
            if parameter.requires_grad and parameter.numel() and not torch.stack(parameter.aminmax()).isfinite().all():
                told = f"training has diverged: after step {self.state.global_step} the heads are not finite"
                raise RunError(f"{told}; lower training.learning_rate, which is {self.args.learning_rate:g}")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        self.require_finite()
        if self.args.should_save:
            self.heads.save_pretrained(output_dir or str(self.args.output_dir), self.provenance)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        sums = self.log_sums.sums
        self.log_sums.stored = None if sums is None else self._over_processes(sums).tolist()
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # trainer_state.json is written next and completes the checkpoint

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        stored = MedusaHeads.from_pretrained(resume_from_checkpoint, device=self.heads.device)
        self.heads.load_state_dict(stored.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))
