"""A transformers `Trainer` that fits heads on a frozen backbone and saves only heads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs, following_ids
from medusa.tree import load_tree
from medusa.vocabulary import lm_head_for, rows_for, token_ids
from train.evaluate import GuessCounts, label_ranks
from train.labels import IGNORE, head_labels, label_counts
from train.loss import (
    WEIGHTINGS,
    HeadLosses,
    Teacher,
    Weighting,
    backbone_choices,
    chunk_rows,
    head_losses,
    require_backend,
)
from train.progress import ProgressBar
from train.resume import LogBeforeSaving

OBJECTIVES = ("text", "argmax", "distill")
DECAY = 0.8  # the paper's
PROBE_STEPS = 3  # timed training steps from which the length of a run with a time budget is guessed
MARGIN = 5  # a budget ends a run by the clock; its guessed number of steps must not, however slow the probe was


@dataclass
class MedusaTrainingArguments(TrainingArguments):
    """transformers' `TrainingArguments` with our defaults, and what heads need beyond them."""

    objective: str = field(
        default="argmax",
        metadata={
            "help": "what a head is taught at a position: text (the token that stands there), argmax (the token that "
            "the backbone itself finds most probable there; what greedy acceptance compares with) or distill (the "
            "backbone's distribution there)"
        },
    )
    teacher_temperature: float = field(default=1.0, metadata={"help": "of the backbone's distributions, for distill"})
    hard_label_weight: float = field(
        default=0.0, metadata={"help": "of distill's targets that goes to the most probable token alone"}
    )
    head_weighting: str | None = field(
        default=None,
        metadata={
            "help": "dpace (each position's share in the expected number of accepted guesses; the default) or decay "
            "(head k's loss counts head_decay^k; the default where head_decay is given)"
        },
    )
    head_decay: float | None = field(
        default=None, metadata={"help": "loss weight of head k is head_decay^k; 0.8 with decay (paper, 2.2.1)"}
    )
    dpace_smoothing: float = field(default=0.5, metadata={"help": "0: dpace as derived; 1: all heads count as right"})
    hidden_noise: float = field(
        default=0.0,
        metadata={
            "help": "a: while training, heads read hidden states with uniform noise from -a r to a r in every "
            "component, r being the state's root mean square (EAGLE; theirs is 0.1, whatever r is)"
        },
    )
    dropout: float = field(default=0.0, metadata={"help": "share of the outputs of the heads' blocks (Hydra++: 0.2)"})
    scheduled_sampling: float = field(
        default=0.0,
        metadata={
            "help": "for heads that follow the path: probability, rising from 0 to this over the run, that a head is "
            "shown the guess of the head before in the place of the text's token"
        },
    )
    loss_backend: str = field(
        default="auto",
        metadata={"help": "chunked (auto's choice), plain (all logits at once) or liger (its kernels; a GPU only)"},
    )
    log_lines: bool = field(default=True, metadata={"help": "print every line of the log, not only the bar"})
    max_minutes: float | None = field(
        default=None, metadata={"help": "train this long; sets max_steps, and the learning rate falls with the clock"}
    )
    eval_tree: str = field(
        default="mc_sim_7b_63",
        metadata={"help": "the tree whose expected tau evaluation tells; cut to the heads' number"},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "stop after so many evaluations without a better metric_for_best_model (eval_loss)"},
    )
    max_cpu_minutes: float | None = field(
        default=None,
        metadata={"help": "max_minutes in CPU time of this process: what recipes are compared by on a busy machine"},
    )
    learning_rate: float = field(default=3e-3, metadata={"help": "peak; `medusa train` chooses it by the hidden size"})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "packed rows a step and device"})
    lr_scheduler_type: str = field(default="linear", metadata={"help": "fall of the learning rate"})
    warmup_steps: float = field(default=0.02, metadata={"help": "steps, or below 1 the share of the run"})
    adam_beta2: float = field(default=0.95, metadata={"help": "shorter context_kv than 0.999: runs are short"})
    logging_steps: float = field(default=20, metadata={"help": "steps between lines of the log"})
    save_total_limit: int | None = field(default=2, metadata={"help": "checkpoints kept"})
    report_to: str | list[str] | None = field(default="none", metadata={"help": "tensorboard, wandb, trackio, ..."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "our rows hold what the loss reads"})
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "all heads learn in every step"})
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "a resumed run has the time left that it had"}
    )

    def __post_init__(self) -> None:
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_loss"
        super().__post_init__()
        if self.objective not in OBJECTIVES:
            raise RequestError(f"training.objective is {self.objective!r}; choose one of {', '.join(OBJECTIVES)}")
        for name in ("max_minutes", "max_cpu_minutes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise RequestError(f"training.{name} is {getattr(self, name)}; it must be above 0")
        if self.max_minutes is not None and self.max_cpu_minutes is not None:
            raise RequestError("training.max_minutes and max_cpu_minutes are two budgets; give one of them")
        if self.head_weighting not in (None, *WEIGHTINGS):
            raise RequestError(
                f"training.head_weighting is {self.head_weighting!r}; choose one of {', '.join(WEIGHTINGS)}"
            )
        if self.head_decay is not None:
            if self.head_weighting == "dpace":
                raise RequestError("training.head_decay is for head_weighting decay; leave one of them out")
            if not 0 < self.head_decay <= 1:
                raise RequestError(f"training.head_decay is {self.head_decay}; it must be above 0 and at most 1")
        if not self.teacher_temperature > 0:
            raise RequestError(
                f"training.teacher_temperature is {self.teacher_temperature}; it must be above 0 (the limit is argmax)"
            )
        if not self.hidden_noise >= 0:
            raise RequestError(f"training.hidden_noise is {self.hidden_noise}; it must be 0 (off) or above")
        if not 0 <= self.dropout < 1:
            raise RequestError(f"training.dropout is {self.dropout}; it must be at least 0 (off) and below 1")
        for name in ("hard_label_weight", "dpace_smoothing", "scheduled_sampling"):
            if not 0 <= getattr(self, name) <= 1:
                raise RequestError(f"training.{name} is {getattr(self, name)}; it must lie between 0 and 1")
        if self.early_stopping_patience is not None:
            if self.early_stopping_patience < 1:
                raise RequestError(
                    f"training.early_stopping_patience is {self.early_stopping_patience}; take 1 or more"
                )
            if self.eval_strategy == "no":
                raise RequestError("training.early_stopping_patience needs evaluations; add eval_data to the recipe")
        require_backend(self.loss_backend, self.objective, self.weighting.kind)

    @property
    def weighting(self) -> Weighting:
        """How much each head's error counts."""
        kind = self.head_weighting or ("dpace" if self.head_decay is None else "decay")
        return Weighting(kind, DECAY if self.head_decay is None else self.head_decay, self.dpace_smoothing)


class Taught(NamedTuple):
    """The positions of a batch at which heads are taught."""

    inputs: HeadInputs
    """Of the heads at the R positions."""
    labels: Tensor
    """[K, R] or IGNORE."""
    teacher: Teacher | None


class HeadsOnBackbone(nn.Module):
    """What the Trainer trains: heads as parameters, the backbone beside them.

    The backbone stays outside the module tree, so that parameters, state dict, optimiser and checkpoints are the
    heads' alone.
    """

    def __init__(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> None:
        super().__init__()
        self.heads, self.args = heads, args
        self.weighting = args.weighting
        self.scheduled_sampling = 0.0  # the probability in force; the trainer lets it rise
        if args.scheduled_sampling and not heads.follows_path:
            raise RequestError(
                f"training.scheduled_sampling: heads of kind {heads.config.kind} see no guesses; leave it out, or take "
                "a kind that follows the path (docs/heads.md)"
            )
        if args.dropout:
            heads.set_dropout(args.dropout)
        if getattr(model, "hf_device_map", None):  # spread over devices: the Trainer then leaves heads in their place
            self.hf_device_map = model.hf_device_map
        backbone = Backbone(model.requires_grad_(False).eval())
        if args.objective == "distill" and not backbone.splits:
            raise RequestError(
                "training.objective distill: this backbone caps or scales its LM head's output, so that its softmax is "
                "not the backbone's distribution; take argmax, which is the same either way"
            )
        self._outside = (backbone,)  # a tuple: no submodule

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
        taught = self.taught(input_ids, position_ids, document_ids, loss_mask, hidden)
        lm_head, backend = self._outside[0].head, self.args.loss_backend
        if self.heads.vocabulary is not None and self.heads.lm_heads is None:
            lm_head = rows_for(self.heads, lm_head)
        inputs, labels, teacher = taught
        return head_losses(self.heads, inputs, labels, lm_head, self.weighting, teacher, backend)

    def taught(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        hidden: Tensor | None = None,
    ) -> Taught:
        """What `forward` makes of a batch, with the backbone alone."""
        backbone, args = self._outside[0], self.args
        # In evaluation, what `distill` teaches is also compared with the heads' guesses, token by token.
        argmax = args.objective == "argmax" or (args.objective == "distill" and not self.training)
        with torch.no_grad():
            hidden = self.states(input_ids, position_ids) if hidden is None else hidden
        hidden = hidden.to(backbone.dtype)  # may carry gradients
        with torch.no_grad():
            tokens = backbone_choices(backbone, hidden, input_ids) if argmax else input_ids
        labels = head_labels(tokens, loss_mask, document_ids, self.heads.config.num_heads).flatten(1)
        # Where head 0 has no label the next token but one is not the backbone's: no decoding step starts there.
        taught = (labels[0] != IGNORE).nonzero()[:, 0]
        hidden = hidden.flatten(0, 1)
        teacher = None
        if args.objective == "distill":
            words = self.heads.vocabulary
            teacher = Teacher(hidden, taught, backbone.head, args.teacher_temperature, args.hard_label_weight, words)
        shown = hidden.view(*input_ids.shape, -1).to(self.heads.dtype)
        if self.training and args.hidden_noise:
            shown = with_noise(shown, args.hidden_noise)
        inputs = self.heads.inputs(shown, input_ids, backbone.embed, position_ids, document_ids, taught)
        if self.training and self.scheduled_sampling:
            ids = following_ids(input_ids, self.heads.config.num_heads).flatten(0, 1)[taught]
            ids = self.with_scheduled_sampling(inputs, ids)
            inputs = inputs._replace(following=backbone.embed(ids).to(inputs.hidden))
        return Taught(inputs, labels[:, taught], teacher)

    @torch.no_grad()
    def with_scheduled_sampling(self, inputs: HeadInputs, ids: Tensor) -> Tensor:
        """The tokens that the heads follow, `ids` [R, K], with some of them replaced by the heads' own guesses [R, K].

        With probability `scheduled_sampling` head k sees the guess of head k - 1, in one pass over the text's own
        tokens (scheduled sampling, Bengio et al. 2015; in parallel, Duckworth et al. 2019). The root is never a guess.
        """
        if ids.shape[1] == 1:
            return ids
        backbone, replaced = self._outside[0], torch.rand(ids[:, 1:].shape, device=ids.device) < self.scheduled_sampling
        lm_head = lm_head_for(self.heads, backbone)
        rows = chunk_rows(ids.shape[1], backbone.vocab_size, inputs.hidden.device.type)
        features = self.heads.features(inputs, ids.shape[1] - 1)
        guesses = [
            token_ids(self.heads, self.heads.logits(part, lm_head).argmax(-1)).T for part in features.split(rows, dim=1)
        ]
        return torch.cat([ids[:, :1], torch.where(replaced, torch.cat(guesses).to(ids.device), ids[:, 1:])], dim=1)

    def states(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """The backbone's hidden states [B, T, H], in its own dtype whatever `bf16` says: decoding shows no others."""
        with torch.no_grad(), torch.autocast(input_ids.device.type, enabled=False):
            return self._outside[0].hidden_states(input_ids, position_ids=position_ids, use_cache=False)


def with_noise(hidden: Tensor, amplitude: float) -> Tensor:
    """hidden [..., H] plus, in every component, uniform noise from -a r to a r, where a is `amplitude` and r the root
    mean square of the state. (EAGLE, arXiv 2401.15077, adds U(-0.1, 0.1) to all states, whatever their scale.)
    """
    scale = hidden.detach().float().square().mean(-1, keepdim=True).sqrt().to(hidden.dtype)
    return hidden + amplitude * scale * (2 * torch.rand_like(hidden) - 1)


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
        self.heads, self.provenance = heads, dict(provenance or {})
        self.minutes = args.max_minutes or args.max_cpu_minutes
        budget = TimeBudget(60 * self.minutes, cpu=args.max_cpu_minutes is not None) if self.minutes else None
        if args.early_stopping_patience is not None:
            kwargs.setdefault("callbacks", []).append(EarlyStoppingCallback(args.early_stopping_patience))
        callbacks = [*kwargs.pop("callbacks", []), LogBeforeSaving(), *([budget] if budget else [])]
        self.trained = self.assemble(heads, model, args)
        super().__init__(model=self.trained, args=args, callbacks=callbacks, **kwargs)
        for noisy in (PrinterCallback, ProgressCallback):  # they write to standard output, which is for results
            self.remove_callback(noisy)
        if not args.disable_tqdm:
            self.add_callback(ProgressBar(args.log_lines, lambda: self.budget))
        self.model_accepts_loss_kwargs = False  # or the Trainer would count labels its own way
        self.loss_is_scaled_for_ga = True  # see share
        self._seen: dict[str, list[Tensor]] = {}
        self.eval_tree = load_tree(args.eval_tree, heads.config.num_heads).clip(heads.config.num_heads)
        self._guesses = GuessCounts(heads.config.num_heads, self.eval_tree)
        self.reading_seconds = 0.0  # waited for batches
        foreign = [n for n, p in self.trained.named_parameters() if p.requires_grad and not self.is_ours(n)]
        if foreign:
            raise RuntimeError(f"only heads may be trained, not {foreign[0]}")

    def assemble(self, heads: MedusaHeads, model: PreTrainedModel, args: MedusaTrainingArguments) -> HeadsOnBackbone:
        """The module to train."""
        return HeadsOnBackbone(heads, model, args)

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

    def progress(self) -> float:
        """Share of the run that is done."""
        if self.budget is not None:
            return min(1.0, self.budget.now() / self.budget.seconds)
        return self.state.global_step / max(self.state.max_steps, 1)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The batches of one optimiser step, and how many labels are in all of them on all processes."""
        self.trained.scheduled_sampling = self.trained.args.scheduled_sampling * self.progress()
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
            torch.stack([losses.loss * losses.total, losses.correct, losses.total]).double().cpu()
        )
        loss = self.total_loss(losses, num_items_in_batch if isinstance(num_items_in_batch, Tensor) else None)
        return (loss, {"loss": loss.detach()}) if return_outputs else loss

    def total_loss(self, losses: HeadLosses, of_step: Tensor | None) -> Tensor:
        """What is minimised: the heads' mean losses, weighted. `of_step`: how many labels the whole step has [K]."""
        return (losses.objective * self.share(losses.total, of_step)).sum()

    def share(self, labels: Tensor, of_step: Tensor | None) -> Tensor | float:
        """What a micro-batch's mean counts for in the mean over all labels of an optimiser step.

        Micro-batches are added up, and processes averaged: so the loss and its gradients are those of one process with
        one batch, whatever number of labels falls on which.
        """
        if of_step is None:  # in evaluation every batch stands for itself
            return 1.0
        # A Trainer without `loss_is_scaled_for_ga` (5.17) divides by the number of micro-batches, whatever we say.
        undone = 1 if hasattr(Trainer, "loss_is_scaled_for_ga") else self.current_gradient_accumulation_steps
        return labels * self.args.world_size * undone / of_step.clamp_min(1)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            batch = self._prepare_inputs(inputs)
            if "hidden" not in batch:
                batch["hidden"] = self.trained.states(batch["input_ids"], batch["position_ids"])
            taught = self.trained.taught(**batch)
            ranks = label_ranks(self.backbone, self.heads, taught.inputs, taught.labels)
            self._guesses.add(ranks, taught.labels != IGNORE)
            return self.compute_loss(model, batch).detach(), None, None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As `Trainer.evaluate`; the figures also hold each head's accuracies and the expected tau of `eval_tree`."""
        self._guesses = GuessCounts(self.heads.config.num_heads, self.eval_tree)
        return super().evaluate(*args, **kwargs)

    def _guess_figures(self) -> dict[str, float]:
        """Accuracies and tau over what all processes have evaluated."""
        self._guesses.reduce(lambda sums: self.accelerator.reduce(sums.to(self.args.device), "sum").cpu())
        figures = {"eval_tau": round(self._guesses.expected_tau, 4)}
        for head in self._guesses.figures():
            name = f"eval_head{head['head']}"
            figures |= {f"{name}_top{top}": share for top, share in head["top"].items()}
            figures[f"{name}_conditional"] = head["conditional_top1"]
        return figures

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
            if split == "eval":
                logs |= self._guess_figures()
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
        self.trained.scheduled_sampling = self.trained.args.scheduled_sampling  # what they cost at most
        device, times = self.args.device, []
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            batches = iter(self.get_train_dataloader())
            optimizer = torch.optim.AdamW(learning, lr=1e-4)
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
        self._seen.clear()  # and the transfer of its figures has waited for the device
        return min(times) * self.args.gradient_accumulation_steps  # the first one also warms caches up

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; a run that is shorter than a line of the log gives one at its end."""
        if self.args.max_steps < 0:  # a limit that was asked for stands beside the budget
            self.fit_budget()
        outcome = super().train(*args, **kwargs)
        if self._seen.get("train"):
            self.log({"loss": outcome.training_loss})
        self.heads.eval()  # whoever decodes with them now wants no dropout
        return outcome

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            self.heads.save_pretrained(output_dir or str(self.args.output_dir), self.provenance)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # trainer_state.json, which comes next, says that the checkpoint is whole

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        self.heads.load_state_dict(MedusaHeads.from_pretrained(resume_from_checkpoint).state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class TimeBudget(TrainerCallback, ExportableState):
    """Ends training after `seconds`, and says how far the learning rate is to have fallen by now."""

    def __init__(self, seconds: float, elapsed: float = 0.0, cpu: bool = False) -> None:
        """`cpu`: seconds of this process' CPU time, not of the clock's."""
        self.seconds, self.elapsed, self.cpu = seconds, elapsed, cpu
        self._resumed_at: float | None = None
        self._agreed: float | None = None

    def state(self) -> dict[str, Any]:
        return {"args": {"seconds": self.seconds, "cpu": self.cpu}, "attributes": {"elapsed": self.spent()}}

    def spent(self) -> float:
        """Seconds of training so far, those before an interruption included."""
        return self.elapsed + (0.0 if self._resumed_at is None else self._now() - self._resumed_at)

    def _now(self) -> float:
        return time.process_time() if self.cpu else time.monotonic()

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
        self._resumed_at = self._now()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if args.world_size > 1:  # one clock for all, or learning rates would differ, and one process would stop early
            self._agreed = broadcast_object_list([self.spent()])[0]

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.now() >= self.seconds:
            control.should_training_stop = True
