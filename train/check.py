"""The checks of a recipe before any weights are loaded, and the training arguments that follow from the recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, SchedulerType, Trainer, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import OptimizerNames
from transformers.utils import is_flash_attn_2_available

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.config import MedusaConfig
from medusa.errors import RequestError, choose_one_of, first_line
from medusa.files import Json, require_writable_folder
from medusa.heads import class_of
from medusa.loading import head_sizes, known_classes, load_config, on_meta
from medusa.shipped import shipped_configs
from medusa.tree import load_tree
from train.architecture import learning_rate
from train.arguments import MedusaTrainingArguments
from train.callbacks import say
from train.config import FLASH, NUM_HEADS, HeadsConfig, TrainConfig
from train.data.datasets import require_data, require_template_options
from train.features.files import is_features
from train.hardware import device_defaults, require_own_device
from train.heads import startable
from train.medusa2.adapter import add_lora

CONTINUED_RATE = 0.25  # of the learning rate of new heads, with which tau is lower (docs/log.md)
GUESSES = ("loss", "top1", "top5", "top10", "conditional")  # figures of each head in an evaluation


class Checked(NamedTuple):
    """What `check` has read and made: the training arguments, the backbone's config, and the heads to start from."""

    arguments: MedusaTrainingArguments
    backbone: PretrainedConfig
    start: Checkpoint | None


def check(config: TrainConfig, quiet: bool) -> Checked:
    """Check a recipe before the backbone's weights are loaded.

    Raise RequestError if the data or the backbone do not exist, or if two keys exclude each other. With `quiet`,
    training will show no progress bar."""
    require_writable_folder(config.output_dir, option="output_dir")
    if config.features_dir is not None:
        require_writable_folder(config.features_dir, option="features_dir")
        if Path(config.features_dir).resolve() == Path(config.output_dir).resolve():  # --overwrite would delete heads
            raise RequestError(f"features_dir is output_dir, {config.output_dir}; give features a folder of their own")
    data = config.data
    if is_features(data.path):
        unused = {f"data.{key}": getattr(data, key) for key in ("exclude", "max_examples", "streaming")}
        for name, given in {"cache_features": config.cache_features, **unused}.items():
            if given:
                raise RequestError(f"{data.path} holds features; leave {name} out")
    else:
        require_data(data)
    if config.eval_data is not None:
        require_data(config.eval_data, "eval_data")
    if config.adapter is not None and config.adapter.quality_data is not None:
        require_data(data.model_copy(update={"path": config.adapter.quality_data}), None)
    require_template_options(config)
    require_adaptable(config, config.heads)
    require_own_device(config.device)
    if config.attention == FLASH and not is_flash_attn_2_available():
        raise RequestError(f"attention: {FLASH} needs a GPU and the package flash-attn; install it, or take sdpa")
    backbone = load_config(config.backbone, config.load_options)
    sizes = head_sizes(backbone)
    num_heads, kind, start = config.heads.num or NUM_HEADS, config.heads.kind, None
    if config.heads.start is not None:
        start = startable(config.heads.start, config.heads, *sizes)
        require_adaptable(config, start.config)
        num_heads, kind = start.config.num_heads, start.config.kind
    else:
        class_of(kind or "medusa").config_from(backbone, num_heads)  # refuses a backbone without such heads
    several = "MASTER_ADDR" in os.environ and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if several and "RANK" not in os.environ:  # accelerate 1.15 started one process, although it was asked for several
        fault = "accelerate launch --cpu starts one process for any --num_processes"
        settings = shipped_configs() / "accelerate" / "two_processes_cpu.yaml"
        say(f"warning: {fault}; use --config_file {settings}, or torchrun")
    rate = learning_rate(sizes[0]) * class_of(kind or "medusa").learning_rate_scale
    if start is not None and config.adapter is None:  # an adapter's own rate follows from this one
        rate *= CONTINUED_RATE
    arguments = _training_arguments(config, rate, quiet)
    if data.streaming and arguments.max_steps <= 0 and not (arguments.max_minutes or arguments.max_cpu_minutes):
        raise RequestError("data.streaming reads without end; give training.max_steps or training.max_minutes")
    load_tree(arguments.eval_tree, num_heads)
    require_usable(arguments, num_heads)
    if config.adapter is not None and known_classes(backbone):  # one that brings its code is checked later
        add_lora(on_meta(backbone), config.adapter)  # refuses layers that the backbone does not have
    return Checked(arguments, backbone, start)


def require_adaptable(config: TrainConfig, heads: HeadsConfig | MedusaConfig) -> None:
    """Raise RequestError if the recipe's LoRA adapter cannot be trained together with these heads."""
    adapter = config.adapter
    if adapter is not None and adapter.teacher_tilt and heads.vocabulary:
        wanted = "adapter.teacher_tilt needs heads that guess among all tokens"
        raise RequestError(f"{wanted}; add adapter.teacher_tilt=0, or leave heads.vocabulary out")
    if adapter is not None and heads.feature_layers is not None:
        found = "an adapter cannot be trained with heads that read several layers"
        way = "heads.feature_layers" if not class_of(heads.kind or "medusa").joins_layers else f"kind {heads.kind}"
        raise RequestError(f"{found}; leave {way} out, or adapter")
    if adapter is not None and adapter.lm_head and heads.lm_head == "shared":
        raise RequestError("adapter.lm_head needs one LM head per head; add heads.lm_head=own")


def _training_arguments(config: TrainConfig, rate: float, quiet: bool) -> MedusaTrainingArguments:
    """Make the training arguments: the recipe's section `training` over defaults, such as the learning `rate`."""
    given: Json = {
        "learning_rate": rate,
        "disable_tqdm": quiet,  # its default depends on the log level of transformers
        **device_defaults(config, config.cache_features or is_features(config.data.path)),
    }
    if config.eval_data is None and (unused := sorted({"eval_steps", "eval_tree"} & set(config.training))):
        raise RequestError(f"training.{unused[0]} needs evaluation data; add `eval_data: FILE`, or leave it out")
    if config.eval_data is not None:
        given |= {"eval_strategy": "steps", "eval_steps": 500}
    try:
        arguments = MedusaTrainingArguments(output_dir=config.output_dir, **given | config.training)
    except RequestError:
        raise
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise RequestError(f"training: {' '.join(str(error).split())}") from None
    # Several GPUs need a launcher: DataParallel would copy the heads but not the backbone, which is no submodule.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    checkpointing = ("activation_checkpointing", "gradient_checkpointing")  # the second: in older transformers
    if config.adapter is None and any(getattr(arguments, name, False) for name in checkpointing):
        raise RequestError("training.activation_checkpointing saves nothing if the backbone is frozen; leave it out")
    steps = arguments.save_steps, arguments.eval_steps
    if arguments.load_best_model_at_end and arguments.save_strategy == "steps" and steps[0] != steps[1]:
        told = "training.load_best_model_at_end finds the best heads only if each evaluation saves a checkpoint"
        raise RequestError(f"{told}; add training.save_steps={steps[1]:g}, or save_strategy=best")
    if arguments.eval_strategy != "no" and config.eval_data is None:
        raise RequestError("training.eval_strategy needs evaluation data; add `eval_data: FILE` to the recipe")
    return arguments


def require_usable(arguments: MedusaTrainingArguments, num_heads: int) -> None:
    """Raise RequestError if a program, optimiser, schedule, data loader or metric that a recipe asks for is missing."""
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
    """Call `make`, and turn its error into a RequestError that names the `key`."""
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
