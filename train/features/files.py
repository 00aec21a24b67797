"""Files of features: the hidden states of a frozen backbone on disk, so that heads train without running it again.

A folder of features is a `manifest.json` and shards `00000.safetensors`, `00001.safetensors`, ... . A shard is either
complete or absent, and writers only add shards. A shard holds N tokens of documents laid end to end (H hidden size):

    hidden [N, H]        inputs of the LM head and of Medusa heads, in the backbone's dtype or a smaller one; for heads
                         that read several layers [N, more]: their states, followed by the LM head's input
    input_ids [N]        int32
    document_ids [N]     int32; index of each token's document within the shard; -1 is padding
    loss_mask [N]        bool; True for tokens that count in the loss

`train.features.cache` writes features of datasets, `train.features.recorder` of generated texts; `Features` reads both.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from medusa.backbone import Backbone
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import Json, read_json, replacing, write_json
from medusa.fingerprint import differs
from train.data.packing import Batch, DataCounts, as_item, padded

MANIFEST = "manifest.json"
FORMAT = "medusa features"
SHARD_BYTES = 2**28  # size of the hidden states in a shard; an interruption loses at most one shard
PER_TOKEN = ("input_ids", "document_ids", "loss_mask")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of features: which backbone computed the hidden states, and how they are stored."""

    backbone: Fingerprint
    dtype: str  # of the stored hidden states, such as "float16"
    hidden_size: int  # of the stored states, of all layers together
    rows: int | None = None  # of a cached dataset; `None` here and below for features that were recorded text by text
    row_length: int | None = None
    rows_per_shard: int | None = None
    raw_prompts: bool | None = field(default=None, compare=False)  # as in `MedusaConfig`, like the next one
    template_options: Json | None = field(default=None, compare=False)
    layers: list[int] | None = None  # as `Backbone.feature_layers`; `None`: only the LM head's input
    format: str = FORMAT
    version: int = 1

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder of features."""
        content = read_json(folder / MANIFEST)
        return cls(**{known.name: content.get(known.name) for known in fields(cls)})

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, which makes it a folder of features."""
        content = {"format": self.format, "version": self.version, **vars(self)}
        write_json(folder / MANIFEST, {name: value for name, value in content.items() if value is not None})

    def same_states(self, other: Manifest) -> bool:
        """Whether two manifests are of hidden states of one backbone in one dtype; the backbone's name may differ."""
        ours, theirs = self.backbone or {}, other.backbone or {}
        same_backbone = all(ours.get(key) == theirs.get(key) for key in ("weights", "dtype"))
        names = ("dtype", "hidden_size", "layers", "version")
        return same_backbone and all(getattr(self, name) == getattr(other, name) for name in names)


def is_features(path: str | Path) -> bool:
    """Whether `path` is a folder of features."""
    manifest = Path(path) / MANIFEST
    return manifest.is_file() and read_json(manifest).get("format") == FORMAT


def token_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Number of bytes that a token takes on disk."""
    return hidden_size * dtype.itemsize + 4 + 4 + 1  # state, token id, document index and loss mask


def shards(folder: Path) -> list[Path]:
    """Paths of all shards in a folder of features, in their order."""
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdigit())


def read_shard(path: Path, *names: str) -> dict[str, Tensor]:
    """Read the tensors called `names` from a shard; raise RequestError if the file is damaged or no shard."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise RequestError(f"{path} is no shard of features ({error}); delete it, to write it again") from None


def write_shard(path: Path, hidden: Tensor, **per_token: Tensor) -> None:
    """Write a shard of N tokens atomically: hidden states [N, H] of size H, and the tensors [N] of `PER_TOKEN`."""
    tensors = {"hidden": hidden, **{name: per_token[name] for name in PER_TOKEN}}
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)


class Features(Dataset[Batch]):
    """Dataset of the training rows in a folder of features, like those of `PackedDataset`, but with hidden states.

    Token ids are in memory, and hidden states memory-mapped. A row never continues in the next shard."""

    def __init__(self, folder: Path, row_length: int) -> None:
        self.folder, self.row_length = folder, row_length
        self.paths = shards(folder)
        self.tokens = [read_shard(path, *PER_TOKEN) for path in self.paths]
        self.counts = DataCounts(
            documents=sum(int((t["document_ids"].unique() >= 0).sum()) for t in self.tokens),
            tokens=sum(int((t["document_ids"] >= 0).sum()) for t in self.tokens),
            taught=sum(int(t["loss_mask"].sum()) for t in self.tokens),
        )
        rows = (math.ceil(len(tensors["input_ids"]) / row_length) for tensors in self.tokens)
        self._starts = [0, *accumulate(rows)]  # number of rows before each shard, and of all rows
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._starts, index) - 1
        path, start = self.paths[shard], (index - self._starts[shard]) * self.row_length
        if path not in self._open:  # opened on first use: a file handle cannot be sent to data loader workers
            self._open[path] = safe_open(path, framework="pt").get_slice("hidden")
        hidden = self._open[path][start : start + self.row_length]
        ids, documents, mask = (self.tokens[shard][name][start : start + self.row_length] for name in PER_TOKEN)
        row = padded(torch.stack([ids, mask.int(), documents]), self.row_length)
        return as_item(*row) | {"hidden": F.pad(hidden, (0, 0, 0, self.row_length - len(hidden)))}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}


def open_features(folder: Path, row_length: int, backbone: Backbone) -> Features:
    """Open a folder of features to train on, as rows of `row_length` tokens.

    Raise RequestError if the features are of another backbone or of other layers, or if no token counts in the loss."""
    manifest = Manifest.read(folder)
    fingerprint = manifest.backbone or {}
    wanted = None if backbone.feature_layers is None else list(backbone.feature_layers)
    if manifest.layers != wanted and not differs(backbone.model, fingerprint):
        held, needed = (layers or "only the last one" for layers in (manifest.layers, wanted))
        ways = "give other data, or other heads.feature_layers"
        raise RequestError(f"the features in {folder} are of the layers {held}, and training needs {needed}; {ways}")
    if manifest.hidden_size != backbone.state_size or differs(backbone.model, fingerprint):
        raise RequestError(f"the features in {folder} are of another backbone, {fingerprint.get('name')}")
    features = Features(folder, row_length)
    for _ in range(features.counts.documents):
        features.counts.add_prompt(manifest.raw_prompts, manifest.template_options)
    if not features.counts.taught:
        raise RequestError(f"nothing to train on in {folder}: {features.counts}")
    return features


def require_features_or_new(folder: Path) -> None:
    """Raise RequestError if a folder exists and holds anything but features."""
    if not is_features(folder) and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} holds files that are not features; give another folder")
