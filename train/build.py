"""The objects of a training run, made from its recipe: backbone (sharded if wanted), data, heads and trainer."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel, set_seed

from medusa.backbone import Backbone
from medusa.checkpoints.folder import load as load_heads
from medusa.errors import RequestError
from medusa.files import Json, read_json
from medusa.fingerprint import known_weights, unlike
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded, load_backbone, load_tokenizer, text_limits
from medusa.options import LoadOptions, dtype_name
from medusa.quantization import quantized_layers
from medusa.records.sources import SETTINGS, WEIGHTS
from train.arguments import MedusaTrainingArguments
from train.callbacks import say
from train.check import check, require_adaptable
from train.config import FLASH, TrainConfig
from train.data.datasets import load_dataset
from train.features.files import is_features, open_features
from train.heads import backbone_for, feature_layers, new_config, new_heads, require_same_heads, started_from
from train.medusa2.adapter import adapt
from train.medusa2.trainer import Medusa2Trainer
from train.trainer import MedusaTrainer
from train.vocabulary import Rows, most_frequent, require_worthwhile, usual_size


class LoadedRun(NamedTuple):
    """A training run's recipe, arguments, backbone, data and heads: all that its trainer is made from."""

    config: TrainConfig
    arguments: MedusaTrainingArguments
    loaded: Loaded
    dataset: Rows
    evaluated: Rows | None
    quality_rows: Rows  # on which the perplexity of an adapted backbone is measured
    heads: MedusaHeads
    started_from: Json | None  # the trained heads that these continue, as the provenance records them


def load(config: TrainConfig, checkpoint: Path | None, quiet: bool) -> LoadedRun:
    """Check a recipe, and load the backbone, the data and the heads that it describes. With `quiet`, print less.

    Raise RequestError if the recipe has errors, or if `checkpoint`, from which the run resumes, holds other heads."""
    arguments, sizes, start = check(config, quiet)
    limits = text_limits(sizes)
    reading = (load_tokenizer(config.backbone, config.load_options), limits.vocab_size, limits.context)
    dataset: Rows | None = None
    if not is_features(config.data.path):  # before the weights are loaded, because the data may have mistakes
        dataset = load_dataset(config.data, *reading, arguments.seed)
    loaded = load_backbone(config.backbone, placement(config.load_options, config.shard_backbone, sizes))
    model, asked = loaded.model, config.heads
    named = (model, config.backbone, config.revision)
    layers = feature_layers(asked, Backbone(model)) if start is None else start.config.feature_layers
    backbone = backbone_for(model, layers)
    if config.attention == FLASH:  # after Backbone's test, whose few tokens need no such kernel
        model.set_attn_implementation(FLASH)
    if not quiet and has_other_writer(config.data.path, model):
        say(
            f"warning: {config.data.path} was written by other weights than those of {config.backbone}, and heads "
            "learn best from the backbone's own text"
        )
    if dataset is None:
        dataset = open_features(Path(config.data.path), config.data.sequence_length, backbone)
    if by_default := asked.vocabulary is None and start is None and config.adapter is None:
        if checkpoint is not None:  # also one whose data, or version, would give another number
            usual = load_heads(str(checkpoint)).config.vocabulary
        else:
            usual = usual_size(new_config(asked, *named), dataset, model.num_parameters())
        asked = asked.model_copy(update={"vocabulary": usual})
    if checkpoint is not None:
        require_same_heads(checkpoint, new_config(asked, *named) if start is None else start.config, model)
    evaluated = None if config.eval_data is None else load_dataset(config.eval_data, *reading)
    quality_rows = dataset
    if config.adapter is not None and config.adapter.quality_data is not None:
        changed = {"path": config.adapter.quality_data, "exclude": None, "streaming": False}
        quality_rows = load_dataset(config.data.model_copy(update=changed), *reading)
    set_seed(arguments.seed)  # so that the initial heads depend on nothing but the seed
    if asked.vocabulary and start is None:
        frequent = most_frequent(dataset, asked.vocabulary, backbone.vocab_size)
        heads = new_heads(model, asked, config.backbone, config.revision, frequent.ids)
        gain = require_worthwhile(heads, model, frequent.coverage, asked.force_vocabulary or by_default)
        if not quiet:
            say(gain)
    else:
        heads = new_heads(model, asked, config.backbone, config.revision, start=start)
    if (raw := dataset.counts.has_raw_prompts) is not None:  # unknown: trained heads keep their own record
        heads.config.raw_prompts = raw
    if dataset.counts.options:  # of texts in a chat template; without any, trained heads keep their own
        heads.config.template_options = dataset.counts.template_options
    require_adaptable(config, heads.config)
    return LoadedRun(config, arguments, loaded, dataset, evaluated, quality_rows, heads, started_from(asked, start))


def has_other_writer(data: str, model: PreTrainedModel) -> bool:
    """Whether `medusa distill` noted beside the file `data` that a model with other weights wrote it."""
    if not Path(data).is_file() or not (noted := Path(data).with_suffix(SETTINGS)).is_file():
        return False
    held, quantized = read_json(noted), bool(quantized_layers(model))
    weights = held.get(WEIGHTS) if isinstance(held, dict) else None
    if not weights or quantized != ("quantization" in held):  # which changes weights by itself
        return False
    own = known_weights(model)
    return bool(own) and unlike(weights, own, quantized)


def build_trainer(run: LoadedRun) -> MedusaTrainer:
    """Make the trainer of a loaded run, after the backbone is sharded or adapted, if the recipe asks for it."""
    config, arguments, model, heads = run.config, run.arguments, run.loaded.model, run.heads
    if config.shard_backbone:
        shard_backbone(model.requires_grad_(False), arguments.device)
        heads.to(arguments.device)
    if config.adapter is None:
        trainer = MedusaTrainer(model, heads, arguments, eval_dataset=run.evaluated)
    else:
        adapt(model, config.adapter)
        trainer = Medusa2Trainer(model, heads, arguments, config.adapter)
    # Not an argument: the Trainer would ask for max_steps of a stream at once, and a time budget sets max_steps later.
    trainer.train_dataset = run.dataset
    return trainer


def placement(options: LoadOptions, shard: bool, config: PretrainedConfig) -> LoadOptions:
    """Return `options` with the backbone's device for this process; of several processes, each uses another GPU.

    With `shard` on GPUs, the device is the CPU, on which the backbone is loaded before it is split over the GPUs.
    In this case, a dtype missing in `options` is taken from `config`, the backbone's configuration."""
    device, rank = options.device, os.environ.get("LOCAL_RANK")
    if device in (None, "cuda"):
        device = f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
    if not shard or device is None:
        return replace(options, device=device)
    dtype = options.dtype or dtype_name(config.dtype or torch.float32)
    return replace(options, device="cpu", dtype=dtype)


def shard_backbone(model: PreTrainedModel, device: torch.device) -> None:
    """Shard a frozen `model` over all processes, in place (FSDP2): a decoder block is gathered only while it runs.

    The embedding and the LM head stay whole on `device`, because the loss reads the LM head's weights in chunks. Raises
    RequestError if there is only one process, or if the model does not name its decoder blocks."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        start = "start with torchrun --nproc-per-node N -m medusa train ..."
        raise RequestError(f"shard_backbone: true needs several processes; {start}")
    if not blocks(model):
        raise RequestError(f"{type(model).__name__} does not name its blocks; leave shard_backbone out")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    whole = nn.ModuleList([module for module in ends if module is not None]).to(device)
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model.get_decoder(), mesh=mesh, ignored_params=set(whole.parameters()))


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks of a model, found by their class names, which transformers lists in `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
