"""A cache of a dataset's features (hidden states) on disk: estimating its cost, writing missing shards, reading it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import default_collate

from medusa.backbone import Backbone
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import free_bytes, readable
from medusa.loading import DTYPES
from medusa.options import dtype_name
from train.data.datasets import PackedDataset
from train.data.packing import Batch
from train.features import files
from train.features.files import PER_TOKEN, Features, Manifest, is_features
from train.states import packed_states
from train.trainer import MedusaTrainer


@dataclass(frozen=True)
class FeaturePlan:
    """Estimates for a cache of features: the disk space that it needs, and the training time that it saves."""

    tokens: int
    missing_bytes: int  # not written yet
    free_bytes: int
    backbone_seconds: float  # per training step, for the backbone's forward; cached features save this time
    heads_seconds: float  # per training step, for everything else
    epochs: float
    layers: int = 1  # of the backbone, whose hidden states are stored for each token

    @property
    def saved_per_epoch(self) -> float:
        """Share of an epoch's time that cached features save in every epoch after the first."""
        return self.backbone_seconds / (self.backbone_seconds + self.heads_seconds)

    @property
    def saved(self) -> float:
        """Share of the run's time that cached features save: none in the first epoch, which computes them."""
        return max(0.0, 1 - 1 / self.epochs) * self.saved_per_epoch

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"saved_per_epoch": self.saved_per_epoch, "saved": self.saved}

    def __str__(self) -> str:
        return (
            f"features: {self.tokens:,} tokens{f' x {self.layers} layers' if self.layers > 1 else ''}, "
            f"{readable(self.missing_bytes)} to write, "
            f"{readable(self.free_bytes)} free; they save {self.saved_per_epoch:.0%} of every epoch after the first, "
            f"{self.saved:.0%} of this run ({self.epochs:.3g} epochs)"
        )

    def require_space(self, folder: Path) -> None:
        """Raise RequestError, with the name of `folder`, if the disk is too small for the features."""
        if self.missing_bytes > self.free_bytes:
            sizes = f"{readable(self.missing_bytes)} in {folder}, where {readable(self.free_bytes)} are free"
            advice = "leave cache_features out, give another features_dir, or features_dtype: float16"
            raise RequestError(f"features would take {sizes}; {advice}")


class FeatureCache:
    """A folder for the backbone's hidden states of all rows in one dataset; some rows may not be written yet."""

    def __init__(
        self, folder: Path, rows: PackedDataset, backbone: Backbone, fingerprint: Fingerprint, dtype: str | None = None
    ) -> None:
        """Describe a cache of the hidden states that `backbone`, of this fingerprint, computes for `rows`.

        No file is read or written yet. Hidden states are stored in `dtype`, by default the backbone's."""
        self.folder, self.rows, self.backbone = folder, rows, backbone
        self.dtype, size = DTYPES[dtype] if dtype else backbone.dtype, backbone.state_size
        self.row_length = rows.input_ids.shape[1]
        self.row_bytes = self.row_length * files.token_bytes(size, self.dtype)
        self.rows_per_shard = max(1, min(len(rows), files.SHARD_BYTES // self.row_bytes))
        name = dtype_name(self.dtype)
        layout = len(rows), self.row_length, self.rows_per_shard
        layers = None if backbone.feature_layers is None else list(backbone.feature_layers)
        form = rows.counts.has_raw_prompts, rows.counts.template_options or None
        self.manifest = Manifest(fingerprint, name, size, *layout, *form, layers)

    def shard_rows(self) -> Iterator[tuple[Path, slice]]:
        """Yield the path of each shard, whether it is written or not, with the rows that it holds."""
        for number, start in enumerate(range(0, len(self.rows), self.rows_per_shard)):
            yield self.folder / f"{number:05}.safetensors", slice(start, start + self.rows_per_shard)

    def require_belonging(self, replace: bool = False) -> None:
        """Raise RequestError if the cache's folder holds anything but undamaged features of this dataset and backbone.

        With `replace`, delete such features. Then only a folder that holds other files, not features, is an error."""
        try:
            self._compare()
        except RequestError:
            if not replace or not is_features(self.folder):  # only features are ever deleted
                raise
            shutil.rmtree(self.folder)

    def _compare(self) -> None:
        if not is_features(self.folder):
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise RequestError(f"{self.folder} holds files that are not features; give another features_dir")
            return
        held, other = Manifest.read(self.folder), "other data"
        if not held.same_states(self.manifest):
            wanted = replace(self.manifest, dtype=held.dtype)
            other = f"dtype {held.dtype}, not {self.manifest.dtype}"
            if not held.same_states(wanted):
                same_backbone = held.same_states(replace(wanted, layers=held.layers, hidden_size=held.hidden_size))
                other = "other layers" if same_backbone else "another backbone or dtype"
        elif held == replace(self.manifest, backbone=held.backbone) and all(
            torch.equal(stored, self._tokens(rows)[name])
            for path, rows in self.shard_rows()
            if path.is_file()
            for name, stored in files.read_shard(path, *PER_TOKEN).items()
        ):
            return
        raise RequestError(f"the features in {self.folder} are of {other}; give another features_dir, or --overwrite")

    def _tokens(self, rows: slice) -> dict[str, Tensor]:
        return {name: getattr(self.rows, name)[rows].flatten() for name in PER_TOKEN}

    @property
    def missing_rows(self) -> int:
        """Number of rows whose shards are not written yet."""
        return sum(len(range(len(self.rows))[rows]) for path, rows in self.shard_rows() if not path.is_file())

    def plan(self, trainer: MedusaTrainer) -> FeaturePlan:
        """Estimate the cache's disk space and the training time that it saves, from a few timed training steps."""
        args, forwards = trainer.args, []

        def timed(batch: Batch) -> Batch:
            start = trainer.probe_clock()
            batch = self._with_hidden(batch)
            batch["hidden"][-1, -1, -1].item()  # waits until the device has computed it
            forwards.append(trainer.probe_clock() - start)
            return batch

        heads = trainer.seconds_per_step(timed)
        steps = args.max_steps if trainer.budget is None else trainer.budget.seconds / heads
        rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return FeaturePlan(
            tokens=len(self.rows) * self.row_length,
            missing_bytes=self.missing_rows * self.row_bytes,
            free_bytes=free_bytes(self.folder),
            backbone_seconds=min(forwards) * args.gradient_accumulation_steps,
            heads_seconds=heads,
            epochs=steps * rows_per_step / len(self.rows) if steps > 0 else args.num_train_epochs,
            layers=len(self.manifest.layers or [None]),
        )

    @torch.no_grad()
    def _with_hidden(self, batch: Batch) -> Batch:
        hidden = packed_states(self.backbone, batch["input_ids"], batch["position_ids"])
        stored = hidden.to(self.dtype)
        if not stored.isfinite().all() and hidden.isfinite().all():
            raise RequestError(
                f"features_dtype {dtype_name(self.dtype)} cannot hold this backbone's states, which are too large; "
                "take bfloat16 or float32"
            )
        return batch | {"hidden": stored}

    def write(self, batch_size: int, process: int = 0, processes: int = 1) -> Iterator[int]:
        """Compute and write the missing shards. After each forward, yield the number of its rows, at most `batch_size`.

        Process `process` (from 0) of `processes` writes every `processes`-th shard, from shard `process` on."""
        if process == 0 and not is_features(self.folder):
            self.manifest.write(self.folder)
        for path, rows in list(self.shard_rows())[process::processes]:
            if path.is_file():
                continue
            hidden, numbers = [], range(len(self.rows))[rows]
            for start in range(0, len(numbers), batch_size):
                batch = default_collate([self.rows[number] for number in numbers[start : start + batch_size]])
                batch = {name: tensor.to(self.backbone.device) for name, tensor in batch.items()}
                hidden.append(self._with_hidden(batch)["hidden"].flatten(0, 1).cpu())
                yield len(batch["input_ids"])
            files.write_shard(path, torch.cat(hidden), **self._tokens(rows))

    def read(self) -> Features:
        """Open the cached dataset with its hidden states; raise RequestError if shards are missing on disk."""
        features = Features(self.folder, self.row_length)
        if len(features) != len(self.rows):
            raise RequestError(f"{self.folder} holds {len(features)} of {len(self.rows)} rows; run again to write them")
        features.counts = self.rows.counts
        return features
