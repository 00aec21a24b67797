"""Checks of the training arguments before any weights are loaded, for mistakes that transformers reports later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import SchedulerType, Trainer, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames

from medusa.errors import RequestError, choose_one_of, first_line
from train.arguments import MedusaTrainingArguments

GUESSES = ("loss", "top1", "top5", "top10", "conditional")  # figures of each head in an evaluation


def require_usable(arguments: MedusaTrainingArguments, num_heads: int) -> None:
    """Raise RequestError if a program, optimiser, schedule, data loader or metric that a recipe asks for is missing.

    `num_heads` is the number of heads, whose metrics an evaluation reports."""
    _require_reporters(arguments)
    model: Any = nn.Linear(1, 1)
    optim, schedule = OptimizerNames(arguments.optim), SchedulerType(arguments.lr_scheduler_type)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _tried(f"optim is {optim.value!r}", lambda: Trainer.get_optimizer_cls_and_kwargs(arguments, model))
    settings: Any = arguments.lr_scheduler_kwargs
    _tried(
        f"lr_scheduler_type is {schedule.value!r}",
        lambda: get_scheduler(
            schedule, optimizer, num_warmup_steps=1, num_training_steps=2, scheduler_specific_kwargs=settings
        ),
    )
    loading: dict[str, Any] = {
        "num_workers": arguments.dataloader_num_workers,
        "persistent_workers": arguments.dataloader_persistent_workers,
        "prefetch_factor": arguments.dataloader_prefetch_factor,
        "multiprocessing_context": arguments.dataloader_multiprocessing_context,
    }
    _tried(f"dataloader_num_workers is {loading['num_workers']}", lambda: DataLoader(TensorDataset(), **loading))
    _require_metric(arguments, num_heads)


def _tried(key: str, make: Callable[[], object]) -> None:
    """Call `make`, and turn its error into a RequestError that names the `key` with its value."""
    try:
        make()
    except (ImportError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise RequestError(f"training.{key}: {first_line(error)}") from None


def _require_reporters(arguments: MedusaTrainingArguments) -> None:
    known, installed = list(INTEGRATION_TO_CALLBACK), get_available_reporting_integrations()
    asked = arguments.report_to if isinstance(arguments.report_to, list) else [arguments.report_to]
    for name in asked:
        if name not in known:
            raise RequestError(f"training.report_to is {name!r}; {choose_one_of(name, ['none', 'all', *known])}")
        if name not in installed:
            others = f", or choose {' or '.join(installed)}, which is installed" if installed else ""
            raise RequestError(f"training.report_to is {name!r}, which is not installed; install it{others}")


def _require_metric(arguments: MedusaTrainingArguments, num_heads: int) -> None:
    metric = arguments.metric_for_best_model
    if metric is None or arguments.eval_strategy == "no":
        return
    known = ["eval_loss", "eval_tau"]
    known += [f"eval_head{head}_{figure}" for head in range(1, num_heads + 1) for figure in GUESSES]
    if f"eval_{metric.removeprefix('eval_')}" not in known:
        raise RequestError(f"training.metric_for_best_model is {metric!r}; {choose_one_of(metric, known)}")
