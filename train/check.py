"""The checks of a recipe before any weights are loaded, and the training arguments that follow from the recipe."""

from __future__ import annotations

import os

from transformers import PretrainedConfig
from transformers.utils import is_flash_attn_2_available

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json, require_writable_folder
from medusa.heads import class_of
from medusa.loading import head_sizes, known_classes, load_config, on_meta
from medusa.shipped import shipped_configs
from medusa.tree import load_tree
from train.architecture import learning_rate
from train.arguments import MedusaTrainingArguments
from train.callbacks import say
from train.config import FLASH, NUM_HEADS, AdapterConfig, HeadsConfig, TrainConfig
from train.data.datasets import require_data, require_template_options
from train.features.files import is_features
from train.hardware import device_defaults, require_own_device
from train.heads import require_startable
from train.medusa2.adapter import add_lora
from train.trainer_checks import require_usable


def check(config: TrainConfig, quiet: bool) -> tuple[MedusaTrainingArguments, PretrainedConfig]:
    """Check a recipe before any weights are loaded, and return its training arguments and its backbone's configuration.

    Raise RequestError if the data or the backbone do not exist, or if two keys exclude each other. With `quiet`,
    training will show no progress bar."""
    require_writable_folder(config.output_dir, option="output_dir")
    if config.features_dir is not None:
        require_writable_folder(config.features_dir, option="features_dir")
    data = config.data
    if is_features(data.path):
        unused = {f"data.{key}": getattr(data, key) for key in ("exclude", "max_examples", "streaming")}
        for name, given in {"cache_features": config.cache_features, **unused}.items():
            if given:
                raise RequestError(f"{data.path} holds features; leave {name} out")
    else:
        require_data(data)
    if config.eval_data is not None:
        require_data(config.eval_data)
    if config.adapter is not None and config.adapter.quality_data is not None:
        require_data(data.model_copy(update={"path": config.adapter.quality_data}))
    require_template_options(config)
    require_adaptable(config, config.heads)
    require_own_device(config.device)
    if config.attention == FLASH and not is_flash_attn_2_available():
        raise RequestError(f"attention: {FLASH} needs a GPU and the package flash-attn; install it, or take sdpa")
    backbone = load_config(config.backbone, config.load_options)
    sizes = head_sizes(backbone)
    num_heads, kind = config.heads.num or NUM_HEADS, config.heads.kind
    if config.heads.start is not None:
        held = require_startable(config.heads.start, config.heads, *sizes)
        require_adaptable(config, held)
        num_heads, kind = held.num_heads, held.kind
    else:
        class_of(kind or "medusa").config_from(backbone, num_heads)  # refuses a backbone without such heads
    several = "MASTER_ADDR" in os.environ and os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true"
    if several and "RANK" not in os.environ:  # accelerate 1.15 started one process, although it was asked for several
        fault = "accelerate launch --cpu starts one process for any --num_processes"
        settings = shipped_configs() / "accelerate" / "two_processes_cpu.yaml"
        say(f"warning: {fault}; use --config_file {settings}, or torchrun")
    rate = learning_rate(sizes[0]) * class_of(kind or "medusa").learning_rate_scale
    arguments = _training_arguments(config, rate, quiet)
    if data.streaming and arguments.max_steps <= 0 and not (arguments.max_minutes or arguments.max_cpu_minutes):
        raise RequestError("data.streaming reads without end; give training.max_steps or training.max_minutes")
    load_tree(arguments.eval_tree, num_heads)
    require_usable(arguments, num_heads)
    if config.adapter is not None:
        _require_modules(config.adapter, backbone)
    return arguments, backbone


def require_adaptable(config: TrainConfig, heads: HeadsConfig | MedusaConfig) -> None:
    """Raise RequestError if the recipe's LoRA adapter cannot be trained together with these heads."""
    adapter = config.adapter
    if adapter is not None and adapter.teacher_tilt and heads.vocabulary:
        wanted = "adapter.teacher_tilt needs heads that guess among all tokens"
        raise RequestError(f"{wanted}; add adapter.teacher_tilt=0, or leave heads.vocabulary out")
    if adapter is not None and heads.feature_layers is not None:
        found = "an adapter cannot be trained with heads that read several layers"
        raise RequestError(f"{found}; leave heads.feature_layers out, or adapter")
    if adapter is not None and adapter.lm_head and heads.lm_head == "shared":
        raise RequestError("adapter.lm_head needs one LM head per head; add heads.lm_head=own")


def _require_modules(adapter: AdapterConfig, backbone: PretrainedConfig) -> None:
    """Raise RequestError if the backbone lacks layers to adapt; a backbone that brings its code is checked later."""
    if known_classes(backbone):
        add_lora(on_meta(backbone), adapter)


def _training_arguments(config: TrainConfig, rate: float, quiet: bool) -> MedusaTrainingArguments:
    """Make the training arguments: the recipe's section `training` over defaults from other keys.

    `rate`: the default learning rate."""
    given: Json = {
        "learning_rate": rate,
        "disable_tqdm": quiet,  # its default depends on the log level of transformers
        **device_defaults(config, config.cache_features or is_features(config.data.path)),
    }
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
    if arguments.eval_strategy != "no" and config.eval_data is None:
        raise RequestError("training.eval_strategy needs evaluation data; add `eval_data: FILE` to the recipe")
    return arguments
