"""The training arguments: transformers' `TrainingArguments`, with other defaults and the fields that heads need."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le, Lt
from transformers import TrainingArguments

from medusa.errors import RequestError
from train.loss.heads import BACKENDS
from train.loss.objectives import ACCEPTANCE_OBJECTIVES, DECAY, WEIGHTINGS, Acceptance, Weighting
from train.sections import Section, one_of, section_of, validated
from train.trainer_keys import LIMITS, UNUSED

OBJECTIVES = ("text", "argmax", "distill", *ACCEPTANCE_OBJECTIVES)


@dataclass
class MedusaTrainingArguments(TrainingArguments):
    """The training arguments of heads: the keys of a recipe's section `training`."""

    objective: Annotated[str, one_of(*OBJECTIVES)] = "argmax"
    """What a head learns at a position: text (the text's token), argmax (the backbone's most probable token, with which
    greedy acceptance compares), distill (the backbone's distribution over tokens), or to be accepted in sampling: tv,
    lk and lk-hybrid (drawn drafts), mass (chosen drafts)."""
    teacher_temperature: Annotated[float, Gt(0)] = 1.0
    """Temperature of the backbone's distributions, with the objective distill; towards 0, this becomes argmax. With tv,
    lk, lk-hybrid and mass: the temperature of decoding, also for the heads."""
    hard_label_weight: Annotated[float, Ge(0), Le(1)] = 0.0
    """With the backbone's distributions: share of the probability that is moved to the most probable token."""
    children: Annotated[int, Ge(1)] = Acceptance.children
    """With the objective mass: number of children of a node in the trees that the heads are trained for."""
    head_weighting: Annotated[str | None, one_of(*WEIGHTINGS)] = None
    """Loss weights of the heads: dpace (by how much each guess adds to the expected number of accepted guesses; the
    default) or decay (head_decay^k for head k; the default if head_decay is given)."""
    head_decay: Annotated[float | None, Gt(0), Le(1)] = None
    """Base of the loss weights head_decay^k, where k counts heads from 0; by default 0.8 (paper, section 2.2.1)."""
    dpace_smoothing: Annotated[float, Ge(0), Le(1)] = 0.5
    """Smoothing of the probabilities in dpace's weights: 0 for none; 1 weights heads as if all were always right."""
    hidden_noise: Annotated[float, Ge(0)] = 0.0
    """Amplitude a of the noise on hidden states in training, uniform from -a r to a r, where r is the root mean square
    of the hidden state (EAGLE: from -0.1 to 0.1); 0: none."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Dropout rate on the outputs of the heads' blocks (Hydra++: 0.2); 0: none."""
    path_dropout: Annotated[float | None, Ge(0), Lt(1)] = None
    """For kinds markov and dflash: share of the positions at which heads do not see the previous token; default 0.4."""
    scheduled_sampling: Annotated[float, Ge(0), Le(1)] = 0.0
    """For heads that read guesses: probability, rising from 0 over the run, of a guess instead of the text's token."""
    loss_backend: Annotated[str, one_of(*BACKENDS)] = "auto"
    """How the loss is computed: chunked (auto's choice), plain (all logits at once) or liger (its kernels; GPU)."""
    log_lines: bool = True
    """Print every line of the log, in addition to the progress bar."""
    max_minutes: Annotated[float | None, Gt(0)] = None
    """Time budget in minutes: the run ends by the clock, and the learning rate falls with the time spent."""
    eval_tree: str = "mc_sim_7b_63"
    """Tree whose expected tau is reported by evaluations; it is cut to the number of heads."""
    early_stopping_patience: Annotated[int | None, Ge(1)] = None
    """Stop after this many evaluations in a row without a better metric_for_best_model (by default eval_loss)."""
    max_cpu_minutes: Annotated[float | None, Gt(0)] = None
    """Like max_minutes, but in CPU time of this process, to compare recipes fairly on a busy machine."""
    save_minutes: Annotated[float, Ge(0)] = 1.0
    """Minutes between rescue checkpoints, of which only the last is kept, for a run that ends suddenly (kill -9). If a
    save takes long, the time between them is 20 times that of a save. 0: none."""
    # Fields of transformers with other defaults:
    learning_rate: float = 3e-3  # the peak; `medusa train` chooses its default by the hidden size
    per_device_train_batch_size: int = 4  # packed rows
    warmup_steps: float = 0.02  # a share of the run
    adam_beta2: float = 0.95  # below the usual 0.999, because runs are short
    logging_steps: float = 20
    save_total_limit: int | None = 2
    remove_unused_columns: bool = False  # the loss reads all columns
    ddp_find_unused_parameters: bool | None = False  # all heads learn in every step
    restore_callback_states_from_checkpoint: bool = True  # a resumed run has the rest of its time budget

    @property
    def device(self) -> torch.device:
        """The device of this process. All processes on CPUs share one, which PyTorch 2.11 cannot load as "cpu:0"."""
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    def __post_init__(self) -> None:
        if self.early_stopping_patience is not None and self.metric_for_best_model is None:
            self.metric_for_best_model = "eval_loss"
        super().__post_init__()
        section, given = training_section(), {}
        defaults = {field.name: field.default for field in fields(self)}
        for name, known in section.model_fields.items():
            value = getattr(self, name)
            if known.metadata and value != defaults[name]:
                given[name] = value.value if isinstance(value, Enum) else value
        validated(section, given, prefix="training.")
        if self.max_minutes is not None and self.max_cpu_minutes is not None:
            raise RequestError("training.max_minutes and max_cpu_minutes are two budgets; give one of them")
        if self.head_decay is not None and self.head_weighting == "dpace":
            raise RequestError("training.head_decay is for head_weighting decay; leave one of them out")
        unlearnt = f"distributions, which {self.objective} does not learn"
        effects = {  # keys that nothing would read
            "children": (self.objective == "mass", f"objective mass, not {self.objective}"),
            "teacher_temperature": (self.learns_distributions, unlearnt),
            "hard_label_weight": (self.learns_distributions, unlearnt),
            "dpace_smoothing": (self.weighting.kind == "dpace", f"head_weighting dpace, not {self.weighting.kind}"),
        }
        for name, (is_read, purpose) in effects.items():
            if not is_read and getattr(self, name) != defaults[name]:
                raise RequestError(f"training.{name} is for {purpose}; leave it out")
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise RequestError("training.early_stopping_patience needs evaluations; add eval_data to the recipe")
        if self.loss_backend == "liger" and (self.learns_distributions or self.weighting.kind != "decay"):
            raise RequestError("training.loss_backend liger has labels and head_weighting decay only; take chunked")
        if self.loss_backend == "liger" and importlib.util.find_spec("liger_kernel") is None:
            raise RequestError("training.loss_backend liger needs the package liger_kernel and a GPU; take auto")

    @property
    def learns_distributions(self) -> bool:
        """Whether the targets are the backbone's distributions over tokens, and not single tokens."""
        return self.objective not in ("text", "argmax")

    @property
    def acceptance(self) -> Acceptance | None:
        """The objective, if it is one of acceptance, made from objective and children; else `None`."""
        return Acceptance(self.objective, self.children) if self.objective in ACCEPTANCE_OBJECTIVES else None

    @property
    def weighting(self) -> Weighting:
        """The rule for the loss weights of the heads, made from head_weighting, head_decay and dpace_smoothing."""
        kind = self.head_weighting or ("dpace" if self.head_decay is None else "decay")
        return Weighting(kind, DECAY if self.head_decay is None else self.head_decay, self.dpace_smoothing)


@cache
def training_section() -> type[Section]:
    """Make the section `training` of a recipe: the fields of `MedusaTrainingArguments` that have an effect here."""
    return section_of(MedusaTrainingArguments, LIMITS, UNUSED)
