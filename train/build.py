"""The objects of a training run, made from its recipe: arguments, backbone, data, heads and trainer."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig, set_seed

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded, load_backbone, load_config
from train.architecture import learning_rate
from train.arguments import MedusaTrainingArguments
from train.callbacks import say
from train.config import TrainConfig
from train.data.datasets import PackedDataset, StreamedDataset, load_dataset, require_data
from train.features.dataset import Features, recorded
from train.features.files import is_features
from train.heads import new_heads, require_same_heads
from train.medusa2.adapter import adapt
from train.medusa2.trainer import Medusa2Trainer
from train.sharding import launched_alone, placement, shard_backbone
from train.trainer import MedusaTrainer
from train.vocabulary import most_frequent, require_worthwhile

Rows = PackedDataset | StreamedDataset | Features
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # the second is its name in older transformers


class LoadedRun(NamedTuple):
    """Everything that a training run needs, except its trainer."""

    config: TrainConfig
    arguments: MedusaTrainingArguments
    loaded: Loaded
    dataset: Rows
    evaluated: Rows | None
    quality_rows: Rows
    """Rows on which the perplexity of an adapted backbone is measured."""
    heads: MedusaHeads


def load(config: TrainConfig, checkpoint: Path | None, quiet: bool) -> LoadedRun:
    """Check a recipe, load its backbone and its data, and make its heads.

    Args:
        checkpoint: checkpoint from which the run is to resume, if any.
        quiet: print no information about the heads, and show no progress bar.

    Raises:
        RequestError: the recipe has an error, something cannot be loaded, or the heads differ from the checkpoint's.
    """
    arguments, sizes = check(config, quiet)
    loaded = load_backbone(config.backbone, placement(config.load_options, config.shard_backbone, sizes))
    if checkpoint is not None:
        require_same_heads(checkpoint, config, loaded.model)
    backbone = Backbone(loaded.model)
    reading = (loaded.tokenizer, backbone.vocab_size, backbone.context)
    dataset: Rows
    if is_features(config.data.path):
        dataset = recorded(Path(config.data.path), config.data.sequence_length, backbone)
    else:
        dataset = load_dataset(config.data, *reading, arguments.seed)
    evaluated = None if config.eval_data is None else load_dataset(config.eval_data, *reading)
    quality_rows = dataset
    if config.adapter is not None and config.adapter.quality_data is not None:
        changed = {"path": config.adapter.quality_data, "exclude": None, "streaming": False}
        quality_rows = load_dataset(config.data.model_copy(update=changed), *reading)
    set_seed(arguments.seed)  # so that the initial heads depend on nothing but the seed
    heads = _heads(config, loaded, dataset, quiet)
    require_adaptable(config, heads)
    return LoadedRun(config, arguments, loaded, dataset, evaluated, quality_rows, heads)


def check(config: TrainConfig, quiet: bool) -> tuple[MedusaTrainingArguments, PretrainedConfig]:
    """Check a recipe before any weights are loaded. Return its training arguments and the backbone's configuration.

    Raises:
        RequestError: the data or the backbone does not exist, or two keys exclude each other.
    """
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
    sizes = load_config(config.backbone, config.load_options)
    if launched_alone():
        say(
            "warning: accelerate launch --cpu starts one process for any --num_processes; "
            "use --config_file configs/accelerate/two_processes_cpu.yaml, or torchrun"
        )
    arguments = training_arguments(config, sizes.get_text_config(decoder=True).hidden_size, quiet)
    if data.streaming and arguments.max_steps <= 0 and not (arguments.max_minutes or arguments.max_cpu_minutes):
        raise RequestError("data.streaming has no end of its own; give training.max_steps or training.max_minutes")
    return arguments, sizes


def training_arguments(config: TrainConfig, hidden_size: int, quiet: bool) -> MedusaTrainingArguments:
    """Make the training arguments from the recipe's section `training`, with defaults from the rest of the recipe.

    Args:
        hidden_size: hidden size of the backbone, from which the default learning rate follows.
        quiet: show no progress bar.

    Raises:
        RequestError: a value is not allowed by `TrainingArguments` or by the rest of the recipe.
    """
    given: Json = {
        "dataloader_pin_memory": config.device not in (None, "cpu"),
        "learning_rate": learning_rate(hidden_size),
        "use_cpu": (config.device or "").startswith("cpu"),
        "disable_tqdm": quiet,  # its default depends on the log level of transformers
    }
    if config.eval_data is not None:
        given |= {"eval_strategy": "steps", "eval_steps": 500}
    try:
        arguments = MedusaTrainingArguments(output_dir=config.output_dir, **given | config.training)
    except RequestError:
        raise
    except (TypeError, ValueError) as error:
        raise RequestError(f"training: {' '.join(str(error).split())}") from None
    # Several GPUs need a launcher: DataParallel would copy the heads but not the backbone, which is no submodule.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if config.adapter is None and any(getattr(arguments, name, False) for name in CHECKPOINTING):
        raise RequestError("training.activation_checkpointing saves nothing if the backbone is frozen; leave it out")
    if arguments.eval_strategy != "no" and config.eval_data is None:
        raise RequestError("training.eval_strategy needs evaluation data; add `eval_data: FILE` to the recipe")
    return arguments


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
    """Check that the recipe's adapter, if it has one, can be trained together with these heads.

    Raises:
        RequestError: the adapter needs other heads.
    """
    if config.adapter is not None and config.adapter.teacher_tilt and heads.vocabulary is not None:
        raise RequestError(
            "adapter.teacher_tilt needs heads that guess among all tokens; "
            "add adapter.teacher_tilt=0, or leave heads.vocabulary out"
        )
    if config.adapter is not None and config.adapter.lm_head and heads.config.lm_head == "shared":
        raise RequestError("adapter.lm_head needs heads with LM heads of their own; add heads.lm_head=own")


def build_trainer(run: LoadedRun) -> MedusaTrainer:
    """Make the trainer of a loaded run. If the recipe says so, first shard the backbone or add an adapter to it."""
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
    # Not an argument: the Trainer would ask for max_steps of a stream at once, and a time budget sets max_steps later.
    trainer.train_dataset = run.dataset
    return trainer
