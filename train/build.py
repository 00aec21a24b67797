"""From a recipe to the objects of a run: its arguments, the backbone, the data, the heads and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig, PreTrainedTokenizerBase, set_seed

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded, load_backbone, load_config
from train.architecture import learning_rate
from train.arguments import MedusaTrainingArguments
from train.callbacks import say
from train.config import TrainConfig
from train.data.datasets import PackedDataset, StreamedDataset, load_dataset, require_data
from train.features.files import Features, is_features, recorded
from train.heads import new_heads, require_same_heads
from train.medusa2.adapter import adapt
from train.medusa2.trainer import Medusa2Trainer
from train.sharding import launched_alone, placement, shard_backbone
from train.trainer import MedusaTrainer
from train.vocabulary import most_frequent, require_worthwhile

Rows = PackedDataset | StreamedDataset | Features
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the second one is the old name


class LoadedRun(NamedTuple):
    """What a run is made of, before its trainer."""

    config: TrainConfig
    arguments: MedusaTrainingArguments
    loaded: Loaded
    dataset: Rows
    evaluated: Rows | None
    quality_rows: Rows
    heads: MedusaHeads


def check(config: TrainConfig, quiet: bool) -> tuple[MedusaTrainingArguments, PretrainedConfig]:
    """Check a recipe before any weights are loaded; returns its training arguments and the backbone's configuration.

    Raises:
        RequestError: no such data or backbone, or keys that do not go together.
    """
    for data in (None if _is_features(config) else config.data, config.eval_data):
        if data is not None:
            require_data(data)
    sizes = load_config(config.backbone, config.load_options)
    if launched_alone():
        say(
            "warning: accelerate launch --cpu starts one process, whatever --num_processes says; "
            "use --config_file configs/accelerate/two_processes_cpu.yaml, or torchrun"
        )
    arguments = training_arguments(config, sizes.get_text_config(decoder=True).hidden_size, quiet)
    if config.data.streaming and config.cache_features:
        raise RequestError("data.streaming has no end, so its hidden states cannot be kept; leave cache_features out")
    if config.data.streaming and arguments.max_steps <= 0 and not (arguments.max_minutes or arguments.max_cpu_minutes):
        raise RequestError("data.streaming has no end of its own; give training.max_steps or training.max_minutes")
    return arguments, sizes


def training_arguments(config: TrainConfig, hidden_size: int, quiet: bool) -> MedusaTrainingArguments:
    """The section `training`, with the defaults that depend on the rest of the recipe.

    Raises:
        RequestError: values that `TrainingArguments` refuses, or that the rest of the recipe rules out.
    """
    given: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 500,
        "dataloader_pin_memory": config.device not in (None, "cpu"),
        "learning_rate": learning_rate(hidden_size),
        "use_cpu": (config.device or "").startswith("cpu"),
        "disable_tqdm": quiet,  # by default it follows the level of transformers' own log
    }
    if config.eval_data is not None:
        given |= {"eval_strategy": "steps", "eval_steps": 500}
    try:
        arguments = MedusaTrainingArguments(output_dir=config.output_dir, **given | config.training)
    except (TypeError, ValueError) as error:
        raise RequestError(f"training: {' '.join(str(error).split())}") from None
    # Several GPUs need a launcher: DataParallel would copy the heads, but not the backbone outside the module tree.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if config.adapter is None and any(getattr(arguments, name, False) for name in CHECKPOINTING):
        raise RequestError("training.activation_checkpointing saves nothing where the backbone is frozen; leave it out")
    if config.adapter is not None and config.eval_data is not None:
        raise RequestError("eval_data is for a frozen backbone; with an adapter, leave it out")
    if arguments.eval_strategy != "no" and config.eval_data is None:
        raise RequestError("training.eval_strategy needs evaluation data; add `eval_data: FILE` to the recipe")
    return arguments


def load(config: TrainConfig, checkpoint: Path | None, quiet: bool) -> LoadedRun:
    """Check a recipe, load the backbone and the data, and make the heads.

    Raises:
        RequestError: see `check`; or something cannot be loaded, or the heads differ from the checkpoint's.
    """
    arguments, sizes = check(config, quiet)
    loaded = load_backbone(config.backbone, placement(config.load_options, config.shard_backbone, sizes))
    if checkpoint is not None:
        require_same_heads(checkpoint, config, loaded.model)
    backbone = Backbone(loaded.model)
    dataset, evaluated = _datasets(config, loaded.tokenizer, backbone, arguments.seed)
    quality_rows = _quality_rows(config, dataset, loaded.tokenizer, backbone)
    set_seed(arguments.seed)  # the heads' start depends on the seed alone, whatever ran before
    heads = _heads(config, loaded, dataset, quiet)
    require_adaptable(config, heads)
    return LoadedRun(config, arguments, loaded, dataset, evaluated, quality_rows, heads)


def _is_features(config: TrainConfig) -> bool:
    """Whether the data are hidden states already.

    Raises:
        RequestError: they are, and something is asked for that they cannot give.
    """
    if not is_features(config.data.path):
        return False
    for name, given in (
        ("cache_features", config.cache_features),
        *((f"data.{key}", getattr(config.data, key)) for key in ("exclude", "max_examples", "streaming")),
    ):
        if given:
            raise RequestError(f"{config.data.path} holds features; leave {name} out")
    return True


def _datasets(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase | None, backbone: Backbone, seed: int
) -> tuple[Rows, Rows | None]:
    """What to train on, and what to evaluate on."""
    sizes = (backbone.vocab_size, backbone.context)
    dataset: Rows
    if _is_features(config):
        dataset = recorded(Path(config.data.path), config.data.sequence_length, backbone)
    else:
        dataset = load_dataset(config.data, tokenizer, *sizes, seed)
    return dataset, None if config.eval_data is None else load_dataset(config.eval_data, tokenizer, *sizes)


def _quality_rows(
    config: TrainConfig, rows: Rows, tokenizer: PreTrainedTokenizerBase | None, backbone: Backbone
) -> Rows:
    """The rows whose perplexity is measured."""
    if config.adapter is None or config.adapter.quality_data is None:
        return rows
    changed = {"path": config.adapter.quality_data, "exclude": None, "streaming": False}
    return load_dataset(config.data.model_copy(update=changed), tokenizer, backbone.vocab_size, backbone.context)


def _heads(config: TrainConfig, loaded: Loaded, dataset: Rows, quiet: bool) -> MedusaHeads:
    asked = config.heads
    if not asked.vocabulary or asked.start is not None:
        return new_heads(loaded.model, asked, config.backbone, config.revision)
    frequent = most_frequent(dataset, asked.vocabulary, Backbone(loaded.model).vocab_size)
    heads = new_heads(loaded.model, asked, config.backbone, config.revision, frequent.ids)
    gain = require_worthwhile(heads, loaded.model, frequent.coverage, asked.force_vocabulary)
    if not quiet:
        say(gain)
    return heads


def require_adaptable(config: TrainConfig, heads: MedusaHeads) -> None:
    """Check that the backbone can be adapted together with these heads.

    Raises:
        RequestError: something in the recipe rules it out.
    """
    if config.adapter is None:
        return
    if config.shard_backbone:
        raise RequestError("a sharded backbone cannot be adapted; leave shard_backbone or adapter out")
    if config.data.streaming and config.adapter.quality_data is None:
        raise RequestError("data.streaming has no end to measure a perplexity on; name a file as adapter.quality_data")
    if config.adapter.teacher_tilt and heads.vocabulary is not None:
        raise RequestError(
            "adapter.teacher_tilt needs heads that guess among all tokens; "
            "add adapter.teacher_tilt=0, or leave heads.vocabulary out"
        )
    if config.adapter.lm_head and heads.config.lm_head == "shared":
        raise RequestError("adapter.lm_head needs heads with LM heads of their own; add heads.lm_head=own")


def build_trainer(run: LoadedRun) -> MedusaTrainer:
    """The trainer, with the backbone sharded or adapted where the recipe says so."""
    config, arguments, model, heads = run.config, run.arguments, run.loaded.model, run.heads
    if config.shard_backbone:
        shard_backbone(model.requires_grad_(False), arguments.device)
        heads.to(arguments.device)
    trainer: MedusaTrainer
    if config.adapter is None:
        trainer = MedusaTrainer(model, heads, arguments, eval_dataset=run.evaluated)
    else:
        adapt(model, config.adapter)
        trainer = Medusa2Trainer(model, heads, arguments, config.adapter)
    trainer.train_dataset = run.dataset  # not before: a stream has no length, and a budget sets max_steps later
    return trainer
