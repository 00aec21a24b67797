"""A whole training run, as `medusa train` does it: check the recipe, load, train, save the heads, and report."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import disk_may_fill
from medusa.memory import bytes_of
from medusa.progress import ProgressLines
from train.build import LoadedRun, build_trainer, load
from train.callbacks import say
from train.checkpoints import checkpoint_to_resume, remove_checkpoints, require_room, way_out_of_full_disk
from train.config import TrainConfig
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.cache import FeatureCache, FeaturePlan
from train.features.files import is_features
from train.heads import describe
from train.medusa2.adapter import write_merged
from train.medusa2.lm_loss import Perplexities, measure_perplexities
from train.outcome import PICTURE, RunFigures, draw_curves
from train.trainer import MedusaTrainer


def train(config: TrainConfig, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> RunFigures:
    """Train heads by the recipe `config`, and save them in its `output_dir`.

    With `resume`, continue from the last complete checkpoint there; with `overwrite`, replace heads, checkpoints and
    features there; with `quiet`, show no progress bar and print only warnings. Raise RequestError before training if
    the recipe cannot be carried out, and RunError if the disk has filled up."""
    output = Path(config.output_dir)
    checkpoint = checkpoint_to_resume(output, resume, overwrite)
    run = load(config, checkpoint, quiet)
    require_room(output, bytes_of(run.heads), run.arguments)
    trainer = build_trainer(run)
    trainer.provenance = _provenance(run, trainer.args.max_steps)
    first = trainer.args.process_index == 0
    if overwrite and first:
        remove_checkpoints(output)  # otherwise --resume could continue from an old one
    if not quiet:
        if not isinstance(run.dataset, StreamedDataset):
            say(f"data: {run.dataset.counts}")
        say(describe(run.heads.config, run.heads.num_parameters, trainer.backbone))
    with disk_may_fill(output, lambda: way_out_of_full_disk(output)):
        if config.cache_features and isinstance(run.dataset, PackedDataset):  # not a stream or features
            _cache_features(_feature_cache(run, run.dataset, trainer.backbone), trainer, overwrite, quiet)
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        figures = RunFigures.of(trainer, outcome.metrics)  # first, because it holds the peak memory of training
        figures = replace(figures, perplexities=_perplexities(run, trainer.backbone))
        trainer.provenance |= {"data": asdict(run.dataset.counts), "result": figures.to_dict()}
        trainer.save_model()
        if config.adapter is not None and config.adapter.merge and first:
            say(f"merged backbone saved in {write_merged(config, run.loaded, run.heads)}")
    if not quiet:
        if isinstance(run.dataset, StreamedDataset):
            say(f"data read: {run.dataset.counts}")
        say(str(figures))
        if first:
            draw_curves(trainer.state.log_history, output / PICTURE)
        say(f"heads saved in {output}")
    return figures


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
    """Write the training data's hidden states that are missing on disk, and make the trainer read them from disk."""
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


def _perplexities(run: LoadedRun, backbone: Backbone) -> Perplexities | None:
    """Measure and print the backbone's perplexity without and with its adapter. Return `None` without an adapter."""
    adapter, rows = run.config.adapter, run.quality_rows
    if adapter is None:
        return None
    assert not isinstance(rows, StreamedDataset)  # the recipe's validation forbids a stream here
    found = measure_perplexities(backbone, rows)
    say(f"perplexity on {adapter.quality_data or 'training data'}: {found}")
    return found


def _provenance(run: LoadedRun, max_steps: int) -> dict[str, object]:
    """The provenance of trained heads, to save with them: command, recipe, data, backbone and versions of packages."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "config": run.config.model_dump(),
        "data": asdict(run.dataset.counts),
        "backbone": run.heads.config.backbone,
        "max_steps": max_steps,
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "safetensors")},
    }
