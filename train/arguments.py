"""The training arguments: transformers' `TrainingArguments` with our defaults and the fields that heads need."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import TrainingArguments

from medusa.errors import RequestError
from train.loss.heads import require_backend
from train.loss.weighting import DECAY, WEIGHTINGS, Weighting

OBJECTIVES = ("text", "argmax", "distill")
LIMITS = {
    "ge": ("at least", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


def _field(default: object, help: str, **allowed: object) -> Any:
    """A field with its description and what it may be: `choices`, or limits by the names in `LIMITS`."""
    return field(default=default, metadata={"help": help, **allowed})


@dataclass
class MedusaTrainingArguments(TrainingArguments):
    """The fields of a recipe's section `training`."""

    objective: str = _field(
        "argmax",
        "target of a head at a position: text (the token that stands there), argmax (the backbone's most probable "
        "token there, which greedy acceptance compares with) or distill (the backbone's distribution there)",
        choices=OBJECTIVES,
    )
    teacher_temperature: float = _field(1.0, "temperature of the backbone's distributions, for distill", gt=0)
    hard_label_weight: float = _field(
        0.0, "share of distill's target that goes to the most probable token alone", ge=0, le=1
    )
    head_weighting: str | None = _field(
        None,
        "dpace (each position's share in the expected number of accepted guesses; the default) or decay (head k's loss "
        "counts head_decay^k; the default where head_decay is given)",
        choices=WEIGHTINGS,
    )
    head_decay: float | None = _field(
        None, f"loss weight of head k is head_decay^k; {DECAY} with decay (paper, 2.2.1)", gt=0, le=1
    )
    dpace_smoothing: float = _field(0.5, "0: dpace as derived; 1: as if all heads were always right", ge=0, le=1)
    hidden_noise: float = _field(
        0.0,
        "amplitude a of the noise on the hidden states that heads read in training: uniform from -a r to a r in every "
        "component, where r is the state's root mean square (EAGLE: from -0.1 to 0.1, whatever r is); 0: none",
        ge=0,
    )
    dropout: float = _field(0.0, "dropout on the outputs of the heads' blocks (Hydra++: 0.2); 0: none", ge=0, lt=1)
    scheduled_sampling: float = _field(
        0.0,
        "probability that a head is shown the previous head's guess instead of the text's token, rising from 0 to this "
        "over the run; for heads that follow the path",
        ge=0,
        le=1,
    )
    loss_backend: str = _field(
        "auto", "chunked (auto's choice), plain (all logits at once) or liger (its kernels; a GPU only)"
    )
    log_lines: bool = _field(True, "print every line of the log, not only the bar")
    max_minutes: float | None = _field(
        None, "time budget; sets max_steps, and the learning rate falls with the time spent", gt=0
    )
    eval_tree: str = _field("mc_sim_7b_63", "tree whose expected tau evaluation reports, cut to the number of heads")
    early_stopping_patience: int | None = _field(
        None, "stop after so many evaluations without a better metric_for_best_model (eval_loss)", ge=1
    )
    max_cpu_minutes: float | None = _field(
        None, "max_minutes in CPU time of this process: compares recipes fairly on a busy machine", gt=0
    )
    learning_rate: float = _field(3e-3, "peak learning rate; `medusa train` chooses it by the hidden size")
    per_device_train_batch_size: int = _field(4, "packed rows per step and device")
    lr_scheduler_type: str = _field("linear", "how the learning rate falls")
    warmup_steps: float = _field(0.02, "steps of warm-up, or below 1 a share of the run")
    adam_beta2: float = _field(0.95, "Adam's beta2; below the usual 0.999, because runs are short")
    logging_steps: float = _field(20, "steps between lines of the log")
    save_total_limit: int | None = _field(2, "number of checkpoints to keep")
    report_to: str | list[str] | None = _field("none", "tensorboard, wandb, trackio, ...")  # noqa: RUF009  a field
    remove_unused_columns: bool = _field(False, "stays false: the loss reads all columns of a row")
    ddp_find_unused_parameters: bool | None = _field(False, "all heads learn in every step")
    restore_callback_states_from_checkpoint: bool = _field(True, "a resumed run has the rest of its time budget")

    def __post_init__(self) -> None:
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_loss"
        super().__post_init__()
        self._check_values()
        if self.max_minutes is not None and self.max_cpu_minutes is not None:
            raise RequestError("training.max_minutes and max_cpu_minutes are two budgets; give one of them")
        if self.head_decay is not None and self.head_weighting == "dpace":
            raise RequestError("training.head_decay is for head_weighting decay; leave one of them out")
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise RequestError("training.early_stopping_patience needs evaluations; add eval_data to the recipe")
        require_backend(self.loss_backend, self.objective, self.weighting.kind)

    def _check_values(self) -> None:
        for known in fields(self):
            value, choices = getattr(self, known.name), known.metadata.get("choices")
            if value is None:
                continue
            if choices and value not in choices:
                raise RequestError(f"training.{known.name} is {value!r}; choose one of {', '.join(choices)}")
            limits = {name: known.metadata[name] for name in LIMITS if name in known.metadata}
            if not all(LIMITS[name][1](value, limit) for name, limit in limits.items()):
                wanted = " and ".join(f"{LIMITS[name][0]} {limit}" for name, limit in limits.items())
                raise RequestError(f"training.{known.name} is {value}; it must be {wanted}")

    @property
    def weighting(self) -> Weighting:
        """How much each head's error counts."""
        kind = self.head_weighting or ("dpace" if self.head_decay is None else "decay")
        return Weighting(kind, DECAY if self.head_decay is None else self.head_decay, self.dpace_smoothing)
