"""A training run from its configuration: check, load, train, save; `medusa train` is this."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, set_seed

from medusa import backbone as backbones
from medusa.backbone import Backbone, fingerprint
from medusa.checkpoint import WEIGHTS
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import disk_may_fill, require_absent
from medusa.heads import MedusaHeads
from train.architecture import choose, learning_rate
from train.config import HeadsConfig, TrainConfig
from train.data import PackedDataset, StreamedDataset, load_dataset, require_data
from train.disk import require_room
from train.trainer import MedusaTrainer, MedusaTrainingArguments, checkpoints

PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


def train(config: TrainConfig, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train as `config` says and save the heads in its `output_dir`; returns the final figures.

    Raises:
        RequestError: the request cannot be carried out; said before anything long starts.
    """
    output = Path(config.output_dir)
    checkpoint = _checkpoint(output, resume, overwrite)
    require_data(config.data)
    backbones.require_placement(config.dtype, config.device, config.attention)
    sizes = backbones.load_config(config.backbone, revision=config.revision, trust_remote_code=config.trust_remote_code)
    arguments = _arguments(config, sizes.get_text_config(decoder=True).hidden_size, quiet)
    if config.data.streaming and arguments.max_steps <= 0 and arguments.max_minutes is None:
        raise RequestError("data.streaming has no end of its own; give training.max_steps or training.max_minutes")
    loaded = backbones.load_backbone(
        config.backbone,
        dtype=config.dtype,
        device=config.device,
        attention=config.attention,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )
    backbone = Backbone(loaded.model)
    dataset = load_dataset(config.data, loaded.tokenizer, backbone.vocab_size, backbone.context, arguments.seed)
    set_seed(arguments.seed)  # the heads' start is the seed's, whatever ran before
    heads = new_heads(loaded.model, config.heads, config.backbone, config.revision)
    require_room(output, heads, arguments)
    trainer = MedusaTrainer(loaded.model, heads, arguments)
    trainer.train_dataset = dataset  # not before: a stream has no length, and a time budget finds max_steps later
    if overwrite:  # or a checkpoint of the old run would pass for one of this
        for old in output.glob("checkpoint-*"):
            shutil.rmtree(old)
    trainer.provenance = provenance(config, dataset, trainer)
    if not quiet:
        if isinstance(dataset, PackedDataset):
            _say(f"data: {dataset.counts}")
        _say(describe(heads.config, heads.num_parameters, backbone))
    with disk_may_fill(output, lambda: _way_out(output)):
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.provenance |= {"data": dataset.counts.to_dict(), "result": _result(trainer, outcome.metrics)}
        trainer.save_model()
    result = trainer.provenance["result"]
    if not quiet:
        if isinstance(dataset, StreamedDataset):
            _say(f"data, as far as it was read: {dataset.counts}")
        _say(f"heads saved in {output}")
    return result


def _way_out(output: Path) -> str:
    """What to do where the disk has filled up."""
    if found := checkpoints(output):
        return f"{found[-1].name} is whole: make room and go on with --resume"
    return "nothing was saved yet: make room and start again"


def _checkpoint(output: Path, resume: bool, overwrite: bool) -> Path | None:
    found = checkpoints(output)
    if resume and overwrite:
        raise RequestError("--resume goes on from a checkpoint and --overwrite deletes it; give one of them")
    if resume:
        if not found:
            raise RequestError(f"nothing to resume in {output}: it holds no checkpoint; leave --resume out")
        return found[-1]
    if found and not overwrite:
        raise RequestError(f"{output} holds a checkpoint; go on from it with --resume, or add --overwrite")
    require_absent(output / WEIGHTS, overwrite)
    return None


def _arguments(config: TrainConfig, hidden_size: int, quiet: bool) -> MedusaTrainingArguments:
    given: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 500,
        "dataloader_pin_memory": config.device not in (None, "cpu"),
    }
    given["learning_rate"] = learning_rate(hidden_size)
    given["use_cpu"] = (config.device or "").startswith("cpu")
    given["disable_tqdm"] = quiet  # by default it follows the level of transformers' own log
    try:
        arguments = MedusaTrainingArguments(output_dir=config.output_dir, **given | config.training)
    except (TypeError, ValueError) as error:
        raise RequestError(f"training: {' '.join(str(error).split())}") from None
    if arguments.eval_strategy != "no":
        raise RequestError("training.eval_strategy needs evaluation data, which a recipe cannot name yet; leave it out")
    return arguments


def new_heads(model: PreTrainedModel, asked: HeadsConfig, name: str, revision: str | None = None) -> MedusaHeads:
    """Fresh heads for `model`: what was asked for, and the rest chosen for its sizes; the identity at the start."""
    backbone = Backbone(model)
    if not isinstance(backbone.head, nn.Linear):
        kind = type(backbone.head).__name__
        raise RequestError(f"the backbone's LM head is a {kind}; heads are trained beside a plain Linear one")
    chosen = choose(backbone.hidden_size, backbone.vocab_size, model.num_parameters(), asked)
    heads = MedusaHeads(
        MedusaConfig(
            hidden_size=backbone.hidden_size,
            vocab_size=backbone.vocab_size,
            num_heads=asked.num,
            kind=asked.kind,
            base_model_name_or_path=name,
            backbone=fingerprint(model, name, revision),
            **chosen,
        )
    )
    heads.start_from(backbone.head_weight.detach())
    return heads.to(backbone.head_weight.device)


def describe(config: MedusaConfig, parameters: int, backbone: Backbone) -> str:
    """One line about heads that are to be trained, and who will be able to load them."""
    width = f" of width {config.inner_size}" if config.block == "mlp" else ""
    line = (
        f"heads: {config.num_heads} x {config.num_layers} {config.block} block(s){width}, {config.lm_head} LM head, "
        f"{parameters:,} parameters ({parameters / backbone.model.num_parameters():.0%} of the backbone's)"
    )
    if not config.servable:
        line += "; published formats (TGI, vLLM, ...) hold square blocks only: these heads run here, not in a server"
    return line


def provenance(config: TrainConfig, dataset: PackedDataset | StreamedDataset, trainer: MedusaTrainer) -> dict[str, Any]:
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
    } | heads


def _say(message: str) -> None:
    print(message, file=sys.stderr)
