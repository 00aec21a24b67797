"""A training run from its recipe, as `medusa train` does it: check, load, train, save, and keep the record."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import disk_may_fill, replacing
from medusa.loading import load_backbone
from medusa.memory import bytes_of, peak_memory
from medusa.options import LoadOptions
from train.build import LoadedRun, build_trainer, load
from train.callbacks import say, top1_shares
from train.checkpoints import (
    all_checkpoints,
    checkpoint_to_resume,
    require_room,
    size_on_disk,
    way_out_of_full_disk,
    whole_checkpoints,
)
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.cache import FeatureCache, FeaturePlan
from train.heads import describe
from train.medusa2.backbone import Quality, quality, write_merged
from train.recipe import TrainConfig
from train.trainer import MedusaTrainer

PACKAGES = ("torch", "transformers", "accelerate", "safetensors")
PICTURE = "training.png"


@dataclass(frozen=True)
class RunFigures:
    """The figures of a whole run."""

    steps: int
    seconds: float | None
    loss: float | None
    """Mean over the run."""
    reading_share: float
    """Share of the time spent waiting for data."""
    peak_memory_bytes: dict[str, int]
    """Peak memory of the process and of each GPU (`medusa.memory`)."""
    heads_bytes: int
    checkpoint_bytes: int | None
    """Size with the optimiser's state, about three times the heads; `None` without a checkpoint."""
    heads: dict[str, float]
    """Each head's loss and top-1 in the last line of the log: `head1_loss`, `head1_top1`, ... ."""
    quality: Quality | None
    """Perplexities of an adapted backbone."""

    @classmethod
    def of(cls, trainer: MedusaTrainer, metrics: dict[str, float], quality: Quality | None) -> RunFigures:
        """The figures of a trainer that has trained; `metrics` are the result of its training."""
        last = next((line for line in reversed(trainer.state.log_history) if "head1_loss" in line), {})
        saved = whole_checkpoints(Path(str(trainer.args.output_dir)))
        return cls(
            steps=trainer.state.global_step,
            seconds=metrics.get("train_runtime"),
            loss=metrics.get("train_loss"),
            reading_share=round(trainer.reading_seconds / max(metrics.get("train_runtime", 0), 1e-9), 4),
            peak_memory_bytes=peak_memory(),
            heads_bytes=bytes_of(trainer.heads),
            checkpoint_bytes=size_on_disk(saved[-1]) if saved else None,
            heads={key: value for key, value in last.items() if key.startswith("head")},
            quality=quality,
        )

    @property
    def top1(self) -> list[float]:
        """Each head's top-1, the share of labels that are its best guess, from the last line of the log."""
        return top1_shares(self.heads)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, one flat object."""
        figures = {name: value for name, value in vars(self).items() if name not in ("heads", "quality")}
        if self.quality is not None:
            figures |= {"perplexity_before": self.quality.before, "perplexity_after": self.quality.after}
        return figures | self.heads

    def __str__(self) -> str:
        memory = ", ".join(f"{place} {size / 1e6:,.0f} MB" for place, size in self.peak_memory_bytes.items())
        saved = "" if self.checkpoint_bytes is None else f"; a checkpoint {self.checkpoint_bytes / 1e6:,.1f} MB"
        return f"peak memory: {memory}; heads {self.heads_bytes / 1e6:,.1f} MB{saved}"


def train(config: TrainConfig, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> RunFigures:
    """Train as `config` says and save the heads in its `output_dir`.

    Raises:
        RequestError: the recipe cannot be carried out; raised before anything long starts.
        RunError: the disk has filled up.
    """
    output = Path(config.output_dir)
    checkpoint = checkpoint_to_resume(output, resume, overwrite)
    run = load(config, checkpoint, quiet)
    require_room(output, bytes_of(run.heads), run.arguments)
    trainer = build_trainer(run)
    trainer.provenance = provenance(run, trainer.args.max_steps)
    first = trainer.args.process_index == 0
    if overwrite and first:
        for old in all_checkpoints(output):  # otherwise --resume would take them for the new run's
            shutil.rmtree(old)
    if not quiet:
        if not isinstance(run.dataset, StreamedDataset):
            say(f"data: {run.dataset.counts}")
        say(describe(run.heads.config, run.heads.num_parameters, Backbone(run.loaded.model)))
    with disk_may_fill(output, lambda: way_out_of_full_disk(output)):
        if config.cache_features and isinstance(run.dataset, PackedDataset):  # otherwise these are features already
            _cache_features(_feature_cache(run, run.dataset), trainer, overwrite, quiet)
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        figures = RunFigures.of(trainer, outcome.metrics, _quality(run))
        trainer.provenance |= {"data": run.dataset.counts.to_dict(), "result": figures.to_dict()}
        trainer.save_model()
        if config.adapter is not None and config.adapter.merge and first:
            _merge(run)
    if not quiet:
        if isinstance(run.dataset, StreamedDataset):
            say(f"data read: {run.dataset.counts}")
        say(str(figures))
        if first:
            draw_curves(trainer.state.log_history, output / PICTURE)
        say(f"heads saved in {output}")
    return figures


def plan_features(config: TrainConfig, quiet: bool = False) -> FeaturePlan:
    """Estimate the space and the time that `cache_features` takes and saves, from a few timed steps. Writes nothing.

    Raises:
        RequestError: the data are features already, or a stream.
    """
    run = load(config, None, quiet)
    trainer = build_trainer(run)
    if not isinstance(run.dataset, PackedDataset):
        raise RequestError(f"{config.data.path} holds features or is a stream; there is nothing to plan")
    plan = _feature_cache(run, run.dataset).plan(trainer)
    say(str(plan))
    return plan


def _feature_cache(run: LoadedRun, dataset: PackedDataset) -> FeatureCache:
    folder = Path(run.config.features_dir or Path(run.config.output_dir) / "features")
    backbone, known = Backbone(run.loaded.model), run.heads.config.backbone
    return FeatureCache(folder, dataset, backbone, known, run.config.features_dtype)


def _cache_features(cache: FeatureCache, trainer: MedusaTrainer, overwrite: bool, quiet: bool) -> None:
    """Write the missing hidden states to disk, and train from all of them."""
    args = trainer.args
    with args.main_process_first(desc="comparing features"):
        cache.require_belonging(replace=overwrite and args.process_index == 0)
    plan = cache.plan(trainer)
    plan.require_space(cache.folder)
    if not quiet:
        say(str(plan))
    with Progress(console=Console(stderr=True), disable=quiet or args.process_index > 0) as progress:
        task = progress.add_task("hidden states", total=cache.missing_rows / args.world_size)
        for rows in cache.write(args.train_batch_size, args.process_index, args.world_size):
            progress.advance(task, rows)
    trainer.accelerator.wait_for_everyone()
    trainer.train_dataset = cache.read()


def _quality(run: LoadedRun) -> Quality | None:
    """Measure and print the perplexities of an adapted backbone before and after."""
    adapter, rows = run.config.adapter, run.quality_rows
    if adapter is None:
        return None
    assert not isinstance(rows, StreamedDataset)  # an error in a recipe with an adapter
    found = quality(Backbone(run.loaded.model), rows)
    say(f"perplexity on {adapter.quality_data or 'training data'}: {found}")
    return found


def _merge(run: LoadedRun) -> None:
    """Write the backbone with the adapter merged into it, in the dtype of the training."""
    config, loaded = run.config, run.loaded
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    options = LoadOptions(dtype, "cpu", revision=config.revision, trust_remote_code=config.trust_remote_code)
    base = load_backbone(config.backbone, options).model
    say(f"merged backbone saved in {write_merged(base, loaded.tokenizer, run.heads, Path(config.output_dir))}")


def provenance(run: LoadedRun, max_steps: int) -> dict[str, object]:
    """The origin of a run's heads: command, recipe, data, backbone and versions of packages."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "config": run.config.model_dump(),
        "data": run.dataset.counts.to_dict(),
        "backbone": run.heads.config.backbone,
        "max_steps": max_steps,
        "versions": {name: version(name) for name in PACKAGES},
    }


def draw_curves(log: Sequence[Mapping[str, float]], path: Path) -> None:
    """Draw the loss and each head's top-1 by step, from the log of a run, into a PNG file."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    loss, guesses = figure.subplots(1, 2)
    for prefix, style in (("", "-"), ("eval_", "--")):
        lines = [line for line in log if f"{prefix}loss" in line]
        steps = [line["step"] for line in lines]
        if lines:
            loss.plot(steps, [line[f"{prefix}loss"] for line in lines], style, color="black", label=f"{prefix}loss")
        for head in range(len(top1_shares(lines[-1], prefix)) if lines else 0):
            shares = [line.get(f"{prefix}head{head + 1}_top1") for line in lines]
            guesses.plot(steps, shares, style, color=f"C{head}", label=f"{prefix}head {head + 1}")
    loss.set(xlabel="step", ylabel="weighted loss (nats)")
    guesses.set(xlabel="step", ylabel="top-1", ylim=(0, 1))
    for axes in (loss, guesses):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
