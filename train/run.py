"""A whole training run, as `medusa train` does it: check the recipe, load, train, save the heads, and report."""

from __future__ import annotations

import json
import os
import shlex
import sys
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from medusa.backbone import Backbone
from medusa.checkpoints.stored import PROVENANCE, WEIGHTS
from medusa.errors import Interrupted, RequestError
from medusa.files import Json, disk_may_fill, locked, read_json, require_writable_folder
from medusa.interruptions import Signals, interruptible
from medusa.memory import bytes_of
from medusa.progress import ProgressLines
from train.build import LoadedRun, build_trainer, load
from train.callbacks import say
from train.checkpoints import (
    checkpoint_to_resume,
    kept,
    remove_checkpoints,
    remove_rescues,
    require_room,
    way_out_of_full_disk,
)
from train.config import TrainConfig
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.cache import FeatureCache, FeaturePlan
from train.features.files import is_features
from train.hardware import describe_precision, precision_restored
from train.heads import describe
from train.medusa2.adapter import write_merged
from train.medusa2.lm_loss import measure_perplexities
from train.outcome import PICTURE, RunFigures, draw_curves
from train.trainer import MedusaTrainer

Resume = bool | Literal["auto"]


def train(config: TrainConfig, *, resume: Resume = False, overwrite: bool = False, quiet: bool = False) -> RunFigures:
    """Train heads by the recipe `config`, and save them in its `output_dir`.

    With `resume`, continue from the last complete checkpoint there. With `resume="auto"`, do so if there is one, and
    only return the figures if heads of this recipe are there already. With `overwrite`, replace heads, checkpoints and
    features there; with `quiet`, show no progress bar and print only warnings.

    Raise RequestError before training if the recipe cannot be carried out, and RunError if the disk has filled up. In
    the main thread, SIGINT and SIGTERM raise Interrupted: at once, or while heads are trained, after the running step
    and a checkpoint."""
    output = Path(config.output_dir)
    if resume == "auto" and (done := finished(config)) is not None:
        say(f"{output} holds the trained heads of this recipe already")
        return done
    require_writable_folder(output, option="output_dir")
    full, first = disk_may_fill(output, lambda: way_out_of_full_disk(output)), os.environ.get("RANK", "0") == "0"
    alone = locked(output, wait=False) if first else nullcontext()
    with interruptible(lambda: kept(output)) as signals, full, precision_restored(), alone:
        checkpoint = checkpoint_to_resume(output, resume, overwrite)
        run = load(config, checkpoint, quiet)
        require_room(output, bytes_of(run.heads), run.arguments)
        return _trained(run, checkpoint, signals, overwrite, quiet)


def _trained(run: LoadedRun, checkpoint: Path | None, signals: Signals, overwrite: bool, quiet: bool) -> RunFigures:
    """Train the heads of a loaded run, and save them."""
    config, output, trainer = run.config, Path(run.config.output_dir), build_trainer(run)
    trainer.provenance, trainer.signals = _provenance(run, trainer.args.max_steps), signals
    if overwrite and trainer.args.process_index == 0:
        remove_checkpoints(output)  # otherwise --resume could continue from an old one
    if not quiet:
        if not isinstance(run.dataset, StreamedDataset):
            say(f"data: {run.dataset.counts}")
        say(describe(run.heads.config, run.heads.num_parameters, trainer.backbone))
        say(describe_precision(run.arguments, trainer.backbone.dtype))
    if config.cache_features and isinstance(run.dataset, PackedDataset):  # not a stream or features
        _cache_features(_feature_cache(run, run.dataset, trainer.backbone), trainer, overwrite, quiet)
    metrics = _train(trainer, checkpoint, signals)
    return _finish(run, trainer, metrics, quiet)


def _train(trainer: MedusaTrainer, checkpoint: Path | None, signals: Signals) -> dict[str, float]:
    """Train from `checkpoint` on, and return the metrics of the Trainer."""

    def notice() -> None:
        with suppress(RuntimeError):  # the signal may have come while another line was printed
            say("interrupted: saving a checkpoint after this step; interrupt again to stop without saving")

    try:
        with signals.deferred(notice):
            return trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint)).metrics
    except Exception as error:
        if not signals.number:
            raise
        # The signal went to other processes, too: those that read data or train with this one have ended.
        raise Interrupted(signals.number) from error


def _finish(run: LoadedRun, trainer: MedusaTrainer, metrics: dict[str, float], quiet: bool) -> RunFigures:
    """Save the trained heads with the figures of their run, report, and delete the rescue checkpoints."""
    config, output, first = run.config, Path(run.config.output_dir), trainer.args.process_index == 0
    if config.adapter is not None:
        trainer.save_rescue()  # what follows can take long
    figures = RunFigures.of(trainer, metrics)  # first, because it holds the peak memory of training
    if config.adapter is not None:
        assert not isinstance(run.quality_rows, StreamedDataset)  # the recipe's validation forbids a stream here
        found = measure_perplexities(trainer.backbone, run.quality_rows)
        say(f"perplexity on {config.adapter.quality_data or 'training data'}: {found}")
        figures = replace(figures, perplexity_before=found.before, perplexity_after=found.after)
    trainer.provenance |= {"data": asdict(run.dataset.counts), "result": figures.to_dict()}
    trainer.save_model()
    if config.adapter is not None and config.adapter.merge and first:
        say(f"merged backbone saved in {write_merged(config, run.loaded, run.heads)}")
    if first:
        remove_rescues(output)
    if not quiet:
        if isinstance(run.dataset, StreamedDataset):
            say(f"data read: {run.dataset.counts}")
        say(str(figures))
        if first:
            draw_curves(trainer.state.log_history, output / PICTURE)
        say(f"heads saved in {output}")
    return figures


def finished(config: TrainConfig) -> RunFigures | None:
    """The figures of the heads in the recipe's `output_dir`, if this recipe has made them; else `None`."""
    output = Path(config.output_dir)
    merged = config.adapter is None or not config.adapter.merge or (output / "merged").is_dir()
    if not merged or not (output / WEIGHTS).is_file() or not (output / PROVENANCE).is_file():
        return None
    provenance = read_json(output / PROVENANCE)
    same = _given(provenance.get("config", {})) == _given(json.loads(json.dumps(config.model_dump())))
    return RunFigures.from_dict(provenance["result"]) if same and "result" in provenance else None


def _given(recipe: Json) -> dict[tuple[str, str], object]:
    """Return the values of a recipe by section and key, without nulls: keys left out, except in `training`."""
    parts = {key: part if isinstance(part, dict) else {"": part} for key, part in recipe.items()}
    pairs = ((key, name) for key, part in parts.items() for name in part)
    return {(key, name): parts[key][name] for key, name in pairs if key == "training" or parts[key][name] is not None}


def plan_features(config: TrainConfig, quiet: bool = False) -> FeaturePlan:
    """Estimate and print the disk space that `cache_features` takes for a recipe, and the training time it saves.

    Raise RequestError if the data are features on disk already, or a stream."""
    if config.data.streaming or is_features(config.data.path):
        raise RequestError(f"{config.data.path} holds features or is a stream; there is nothing to plan")
    run = load(config, None, quiet)
    assert isinstance(run.dataset, PackedDataset)
    trainer = build_trainer(run)
    plan = _feature_cache(run, run.dataset, trainer.backbone).plan(trainer)
    say(str(plan))
    return plan


def _feature_cache(run: LoadedRun, dataset: PackedDataset, backbone: Backbone) -> FeatureCache:
    folder = Path(run.config.features_dir or Path(run.config.output_dir) / "features")
    return FeatureCache(folder, dataset, backbone, run.heads.config.backbone, run.config.features_dtype)


def _cache_features(cache: FeatureCache, trainer: MedusaTrainer, overwrite: bool, quiet: bool) -> None:
    """Write the hidden states of the training data that are missing on disk, and let the trainer read them there."""
    args = trainer.args
    with args.main_process_first(desc="comparing features"):
        cache.require_belonging(replace=overwrite and args.process_index == 0)
    plan = cache.plan(trainer)
    plan.require_space(cache.folder)
    if not quiet:
        say(str(plan))
    with ProgressLines(*ProgressLines.get_default_columns(), quiet=quiet or args.process_index > 0) as progress:
        task = progress.add_task("hidden states", total=cache.missing_rows / args.world_size)
        for rows in cache.write(args.train_batch_size, args.process_index, args.world_size):
            progress.advance(task, rows)
    trainer.accelerator.wait_for_everyone()
    trainer.train_dataset = cache.read()


def _provenance(run: LoadedRun, max_steps: int) -> dict[str, object]:
    """The provenance of trained heads, to save with them."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "config": run.config.model_dump(),
        "data": asdict(run.dataset.counts),
        "backbone": run.heads.config.backbone,
        "started_from": run.started_from,
        "max_steps": max_steps,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors")},
    }
