"""A training run from its configuration: check, load, train, save; `medusa train` is this."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from medusa.backbone import Backbone
from medusa.checkpoints.layout import WEIGHTS
from medusa.config import GATED, ORIGINAL_HYDRA, Fingerprint, MedusaConfig
from medusa.errors import RequestError
from medusa.files import disk_may_fill, require_absent
from medusa.fingerprint import fingerprint
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded, LoadOptions, load_backbone, load_config
from train.architecture import choose, learning_rate
from train.config import NUM_HEADS, HeadsConfig, TrainConfig
from train.curves import PICTURE, draw_curves
from train.data import PackedDataset, StreamedDataset, load_dataset, require_data
from train.disk import require_room
from train.features import FeatureCache, Features, is_features, recorded
from train.footprint import footprint
from train.medusa2 import Medusa2Trainer, adapt, quality, write_merged
from train.resume import all_checkpoints, checkpoints
from train.sharding import launched_alone, placement, shard_backbone
from train.trainer import MedusaTrainer, MedusaTrainingArguments
from train.vocabulary import most_frequent, require_worthwhile

Rows = PackedDataset | StreamedDataset | Features
HEADS_ASKED = {"num_heads": "num", "num_layers": "layers"}  # of a heads' configuration, as the YAML's `heads` call it
HEADS_ASKED |= {key: key for key in ("kind", "prefix_layers", "block", "expansion", "lm_head", "vocabulary")}
PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def train(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False, quiet: bool = False, plan: bool = False
) -> dict[str, Any]:
    """Train as `config` says and save the heads in its `output_dir`; returns the final figures.

    With `plan`, only time a few steps and say what features on disk would take and save.

    Raises:
        RequestError: the request cannot be carried out; said before anything long starts.
    """
    output = Path(config.output_dir)
    checkpoint = None if plan else _checkpoint(output, resume, overwrite)
    for data in filter(None, (None if _is_features(config) else config.data, config.eval_data)):
        require_data(data)
    options = LoadOptions(
        dtype=config.dtype,
        device=config.device,
        attention=config.attention,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        quantization=config.quantization,
    )
    sizes = load_config(config.backbone, options)
    if launched_alone():
        _say(
            "warning: accelerate launch --cpu starts one process, whatever --num_processes says; "
            "use --config_file configs/accelerate/two_processes_cpu.yaml, or torchrun"
        )
    arguments = _arguments(config, sizes.get_text_config(decoder=True).hidden_size, quiet)
    if config.data.streaming and config.cache_features:
        raise RequestError("data.streaming has no end, so its hidden states cannot be kept; leave cache_features out")
    if config.data.streaming and arguments.max_steps <= 0 and not (arguments.max_minutes or arguments.max_cpu_minutes):
        raise RequestError("data.streaming has no end of its own; give training.max_steps or training.max_minutes")
    loaded = load_backbone(config.backbone, placement(options, config.shard_backbone, sizes))
    backbone = Backbone(loaded.model)
    if checkpoint is not None:
        _require_same_heads(checkpoint, config, loaded.model)
    dataset, evaluated = _datasets(config, loaded, backbone, arguments.seed)
    quality_rows = _quality_rows(config, dataset, loaded.tokenizer, backbone)
    set_seed(arguments.seed)  # the heads' start is the seed's, whatever ran before
    words = None
    if config.heads.vocabulary and config.heads.start is None:
        words = most_frequent(dataset, config.heads.vocabulary, backbone.vocab_size)
    heads = new_heads(
        loaded.model, config.heads, config.backbone, config.revision, None if words is None else words.ids
    )
    if words is not None:
        worth = require_worthwhile(heads, loaded.model, words.coverage, config.heads.force_vocabulary)
        if not quiet:
            _say(worth)
    _require_adaptable(config, heads)
    if not plan:
        require_room(output, heads, arguments)
    if config.shard_backbone:
        shard_backbone(loaded.model.requires_grad_(False), arguments.device)
        heads.to(arguments.device)
    trainer: MedusaTrainer
    if config.adapter is None:
        trainer = MedusaTrainer(loaded.model, heads, arguments, eval_dataset=evaluated)
    else:
        adapt(loaded.model, config.adapter)
        trainer = Medusa2Trainer(loaded.model, heads, arguments, config.adapter)
    trainer.train_dataset = dataset  # not before: a stream has no length, and a time budget finds max_steps later
    if plan:
        if not isinstance(dataset, PackedDataset):
            raise RequestError(f"{config.data.path} holds features or is a stream; there is nothing to plan")
        foreseen = _cache(config, dataset, trainer).plan(trainer)
        _say(str(foreseen))
        return asdict(foreseen) | {"saved_per_epoch": foreseen.saved_per_epoch, "saved": foreseen.saved}
    if overwrite and arguments.process_index == 0:  # or a checkpoint of the old run would pass for one of this
        for old in output.glob("checkpoint-*"):
            shutil.rmtree(old)
    trainer.provenance = provenance(config, dataset, trainer)
    if not quiet:
        if not isinstance(dataset, StreamedDataset):
            _say(f"data: {dataset.counts}")
        _say(describe(heads.config, heads.num_parameters, backbone))
    with disk_may_fill(output, lambda: _way_out(output)):
        if config.cache_features and isinstance(dataset, PackedDataset):
            trainer.train_dataset = _cached(config, dataset, trainer, overwrite, quiet)
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        result = _result(trainer, outcome.metrics)
        if isinstance(trainer, Medusa2Trainer):
            result |= _quality(trainer, quality_rows)
        trainer.provenance |= {"data": dataset.counts.to_dict(), "result": result}
        trainer.save_model()
        if config.adapter is not None and config.adapter.merge and arguments.process_index == 0:
            _merge(config, trainer, loaded.tokenizer)
    if not quiet:
        if isinstance(dataset, StreamedDataset):
            _say(f"data, as far as it was read: {dataset.counts}")
        _say(summary(result))
        if arguments.process_index == 0 and not draw_curves(trainer.state.log_history, output / PICTURE):
            _say(f"no {PICTURE}: it needs matplotlib")
        _say(f"heads saved in {output}")
    return result


def _way_out(output: Path) -> str:
    """What to do where the disk has filled up."""
    if found := checkpoints(output):
        return f"{found[-1].name} is whole: make room and go on with --resume"
    return "nothing was saved yet: make room and start again"


def _datasets(config: TrainConfig, loaded: Loaded, backbone: Backbone, seed: int) -> tuple[Rows, Rows | None]:
    """What is taught, and what is only looked at."""
    sizes = (backbone.vocab_size, backbone.context)
    dataset: Rows
    if _is_features(config):
        dataset = recorded(Path(config.data.path), config.data.sequence_length, backbone)
    else:
        dataset = load_dataset(config.data, loaded.tokenizer, *sizes, seed)
    if config.eval_data is None:
        return dataset, None
    return dataset, load_dataset(config.eval_data, loaded.tokenizer, *sizes)


def _is_features(config: TrainConfig) -> bool:
    """Whether the data are hidden states already.

    Raises:
        RequestError: they are, and something is asked that they cannot give.
    """
    if not is_features(config.data.path):
        return False
    for name, given in (
        ("cache_features", config.cache_features),
        ("data.exclude", config.data.exclude),
        ("data.max_examples", config.data.max_examples),
        ("data.streaming", config.data.streaming),
    ):
        if given:
            raise RequestError(f"{config.data.path} holds features; leave {name} out")
    return True


def _checkpoint(output: Path, resume: bool, overwrite: bool) -> Path | None:
    found = checkpoints(output)
    if resume and overwrite:
        raise RequestError("--resume goes on from a checkpoint and --overwrite deletes it; give one of them")
    if resume:
        if not found:
            raise RequestError(f"nothing to resume in {output}: it holds no checkpoint; leave --resume out")
        newest = all_checkpoints(output)[-1]
        if newest != found[-1]:
            _say(f"{newest.name} was cut off while it was written; going on from {found[-1].name}")
        return found[-1]
    if found and not overwrite:
        raise RequestError(f"{output} holds a checkpoint; go on from it with --resume, or add --overwrite")
    require_absent(output / WEIGHTS, overwrite)
    return None


def _cache(config: TrainConfig, dataset: PackedDataset, trainer: MedusaTrainer) -> FeatureCache:
    folder = Path(config.features_dir or Path(config.output_dir) / "features")
    return FeatureCache(folder, dataset, trainer.backbone, trainer.heads.config.backbone, config.features_dtype)


def _cached(
    config: TrainConfig, dataset: PackedDataset, trainer: MedusaTrainer, overwrite: bool, quiet: bool
) -> Features:
    """`dataset` with the backbone's hidden states, which are written first where they are missing."""
    cache, args = _cache(config, dataset, trainer), trainer.args
    with args.main_process_first(desc="looking at features"):
        cache.require_belonging(replace=overwrite and args.process_index == 0)
    plan = cache.plan(trainer)
    plan.require_space(cache.folder)
    if not quiet:
        _say(str(plan))
    done = cache.write(args.train_batch_size, args.process_index, args.world_size)
    progress = Progress(console=Console(stderr=True), disable=quiet or args.process_index > 0)
    with progress:
        task = progress.add_task("hidden states", total=cache.missing_rows / args.world_size)
        for rows in done:
            progress.advance(task, rows)
    trainer.accelerator.wait_for_everyone()
    return cache.read()


def _require_adaptable(config: TrainConfig, heads: MedusaHeads) -> None:
    if config.adapter is None:
        return
    if config.shard_backbone:
        raise RequestError("a sharded backbone cannot be adapted; leave shard_backbone or adapter out")
    if config.data.streaming and config.adapter.quality_data is None:
        raise RequestError("data.streaming has no end to take a perplexity on; name a file as adapter.quality_data")
    if config.adapter.teacher_tilt and heads.vocabulary is not None:
        raise RequestError(
            "adapter.teacher_tilt needs heads that know all tokens; "
            "add adapter.teacher_tilt=0, or leave heads.vocabulary out"
        )
    if config.adapter.lm_head and heads.config.lm_head == "shared":
        raise RequestError("adapter.lm_head needs heads with LM heads of their own; add heads.lm_head=own")


def _quality_rows(
    config: TrainConfig, rows: Rows, tokenizer: PreTrainedTokenizerBase | None, backbone: Backbone
) -> Rows:
    """What the perplexity is taken on."""
    if config.adapter is None or config.adapter.quality_data is None:
        return rows
    data = replace(config.data, path=config.adapter.quality_data, exclude=None, streaming=False)
    return load_dataset(data, tokenizer, backbone.vocab_size, backbone.context)


def _quality(trainer: Medusa2Trainer, rows: Rows) -> dict[str, float]:
    """Perplexity before and after, said and returned."""
    where = trainer.adapter.quality_data or "training data"
    assert not isinstance(rows, StreamedDataset)  # refused with the adapter
    found = quality(trainer, rows)
    before, after = found["perplexity_before"], found["perplexity_after"]
    change = f"{after / before - 1:+.2%}"
    _say(f"perplexity on {where}: {before:.3f} before, {after:.3f} after ({change})")
    return found


def _merge(config: TrainConfig, trainer: MedusaTrainer, tokenizer: PreTrainedTokenizerBase | None) -> None:
    dtype = str(trainer.backbone.dtype).removeprefix("torch.")
    options = LoadOptions(dtype, "cpu", revision=config.revision, trust_remote_code=config.trust_remote_code)
    base = load_backbone(config.backbone, options)
    _say(f"merged backbone saved in {write_merged(base.model, tokenizer, trainer.heads, Path(config.output_dir))}")


def _arguments(config: TrainConfig, hidden_size: int, quiet: bool) -> MedusaTrainingArguments:
    given: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 500,
        "dataloader_pin_memory": config.device not in (None, "cpu"),
    }
    if config.eval_data is not None:
        given |= {"eval_strategy": "steps", "eval_steps": 500}
    given["learning_rate"] = learning_rate(hidden_size)
    given["use_cpu"] = (config.device or "").startswith("cpu")
    given["disable_tqdm"] = quiet  # by default it follows the level of transformers' own log
    try:
        arguments = MedusaTrainingArguments(output_dir=config.output_dir, **given | config.training)
    except (TypeError, ValueError) as error:
        raise RequestError(f"training: {' '.join(str(error).split())}") from None
    # Several GPUs need a launcher: DataParallel would copy the heads, but not the backbone beside them.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    checkpointing = ("activation_checkpointing", "gradient_checkpointing")  # the second one is the old name
    if config.adapter is None and any(getattr(arguments, name, False) for name in checkpointing):
        raise RequestError("training.activation_checkpointing saves nothing where the backbone is frozen; leave it out")
    if config.adapter is not None and config.eval_data is not None:
        raise RequestError("eval_data is for a frozen backbone; with an adapter, leave it out")
    if arguments.eval_strategy != "no" and config.eval_data is None:
        raise RequestError("training.eval_strategy needs evaluation data; add `eval_data: FILE` to the recipe")
    return arguments


def new_heads(
    model: PreTrainedModel,
    asked: HeadsConfig,
    name: str,
    revision: str | None = None,
    vocabulary: Tensor | None = None,
) -> MedusaHeads:
    """Fresh heads for `model`: what was asked for, and the rest chosen for its sizes; the identity at the start.

    `vocabulary` [N]: the tokens that they guess among, where these are not all (`train.vocabulary`).
    """
    backbone = Backbone(model)
    if not isinstance(backbone.head, nn.Linear):
        kind = type(backbone.head).__name__
        raise RequestError(f"the backbone's LM head is a {kind}; heads are trained beside a plain Linear one")
    if asked.start is not None:
        return _trained_heads(asked, backbone, fingerprint(model, name, revision))
    heads = MedusaHeads.from_config(
        _config_of(asked, model, name, revision, None if vocabulary is None else len(vocabulary))
    )
    if vocabulary is not None:
        heads.vocabulary = vocabulary
    heads.start_from(backbone.head_weight.detach())
    return heads.to(backbone.head_weight.device)


def _config_of(
    asked: HeadsConfig, model: PreTrainedModel, name: str, revision: str | None, words: int | None
) -> MedusaConfig:
    """Of fresh heads: what was asked for, and the rest chosen for the sizes of `model`."""
    backbone = Backbone(model)
    if asked.lm_head is None and asked.block != "square" and _has_bias(backbone):
        asked = replace(asked, lm_head="shared")  # own ones have none, and would begin far from the backbone's guess
    return MedusaConfig(
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        num_heads=asked.num or NUM_HEADS,
        kind=asked.kind or "medusa",
        prefix_layers=asked.prefix_layers or 0,
        base_model_name_or_path=name,
        backbone=fingerprint(model, name, revision),
        vocabulary=words,
        **choose(backbone.hidden_size, backbone.vocab_size, model.num_parameters(), asked),
    )


def _has_bias(backbone: Backbone) -> bool:
    return getattr(backbone.head, "bias", None) is not None


def _require_same_heads(checkpoint: Path, config: TrainConfig, model: PreTrainedModel) -> None:
    """The heads that a run goes on with are those that it asks for."""
    held, asked = MedusaHeads.from_pretrained(checkpoint).config, config.heads
    if asked.start is None:
        wanted = _config_of(asked, model, config.backbone, config.revision, asked.vocabulary or None)
    else:
        wanted = MedusaHeads.from_pretrained(asked.start).config
    for key in ("hidden_size", "vocab_size", *HEADS_ASKED):
        if getattr(held, key) != getattr(wanted, key):
            raise RequestError(
                f"--resume: {checkpoint} has {key} {getattr(held, key)!r}, not {getattr(wanted, key)!r}; ask for the "
                "same heads again, or begin anew in another output_dir"
            )


def _trained_heads(asked: HeadsConfig, backbone: Backbone, known: Fingerprint) -> MedusaHeads:
    """The heads that a run goes on from."""
    heads = MedusaHeads.from_pretrained(str(asked.start), dtype=torch.float32, device=backbone.head_weight.device)
    held = heads.config
    if held.block == ORIGINAL_HYDRA:
        raise RequestError(
            f"heads.start: {asked.start} holds the original Hydra's heads; they are to be decoded with only"
        )
    wanted = {key: getattr(asked, name) for key, name in HEADS_ASKED.items()} | {"hidden_size": backbone.hidden_size}
    if held.vocab_size is not None:
        wanted["vocab_size"] = backbone.vocab_size
    for key, value in wanted.items():
        if value is not None and value != (getattr(held, key) or 0):  # None is a vocabulary of all tokens: 0
            raise RequestError(f"heads.start: {asked.start} has {key} {getattr(held, key)!r}, not {value!r}")
    held.backbone, held.tree = known, None  # the tree was for the old weights
    return heads.train()


def describe(config: MedusaConfig, parameters: int, backbone: Backbone) -> str:
    """One line about heads that are to be trained, and who will be able to load them."""
    width = f" of width {config.inner_size}" if config.block in ("mlp", GATED) else ""
    line = (
        f"heads: {config.num_heads} x {config.num_layers} {config.block} block(s){width}, {config.lm_head} LM head, "
        + (f"{config.vocabulary:,} of {config.vocab_size:,} tokens, " if config.vocabulary else "")
        + f"{parameters:,} parameters ({parameters / backbone.model.num_parameters():.0%} of the backbone's)"
    )
    if config.lm_head == "own" and _has_bias(backbone):
        line += (
            "; the backbone's LM head has a bias, which theirs lack: with heads.lm_head=shared they begin nearer to it"
        )
    if not config.servable:
        line += (
            "; servers load square blocks of kind medusa, and kind eagle with block gated: these heads run here only"
        )
    return line


def provenance(config: TrainConfig, dataset: Rows, trainer: MedusaTrainer) -> dict[str, Any]:
    """Where a set of heads comes from."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "config": asdict(config),
        "data": dataset.counts.to_dict(),
        "backbone": trainer.heads.config.backbone,
        "max_steps": trainer.args.max_steps,
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _result(trainer: MedusaTrainer, metrics: dict[str, float]) -> dict[str, Any]:
    """Figures of the whole run, and those of the last line of the log about single heads."""
    last = next((line for line in reversed(trainer.state.log_history) if "head1_loss" in line), {})
    heads = {key: value for key, value in last.items() if key.startswith("head")}
    return {
        "steps": trainer.state.global_step,
        "seconds": metrics.get("train_runtime"),
        "loss": metrics.get("train_loss"),
        "reading_share": round(trainer.reading_seconds / max(metrics.get("train_runtime", 0), 1e-9), 4),
        **footprint(trainer.heads, str(trainer.args.output_dir)),
    } | heads


def summary(result: dict[str, Any]) -> str:
    """What a run took, in one line."""
    memory = ", ".join(f"{place} {size / 1e6:,.0f} MB" for place, size in result["peak_memory_bytes"].items())
    checkpoint = result["checkpoint_bytes"]
    saved = "" if checkpoint is None else f"; a checkpoint {checkpoint / 1e6:,.1f} MB"
    return f"peak memory: {memory}; heads {result['heads_bytes'] / 1e6:,.1f} MB{saved}"


def _say(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # one process speaks for all
        print(message, file=sys.stderr)
