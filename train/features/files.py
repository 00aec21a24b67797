"""Features: the frozen backbone's hidden states on disk, so that heads train without running it again.

A folder of features is a `manifest.json` and shards `00000.safetensors`, ... . A shard is whole or absent, and writers
append shards. A shard holds N tokens, documents laid end to end (H hidden size):

    hidden [N, H]        what the LM head and all Medusa heads read, in the backbone's dtype or a shorter one
    input_ids [N]        int32
    document_ids [N]     int32; which of the shard's documents a token belongs to; -1 is padding
    loss_mask [N]        bool; which tokens are taught

`train.features.cache` writes the features of a dataset and `train.features.recorder` those of texts in use.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from medusa.backbone import Backbone
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import read_json, replacing, write_json
from medusa.fingerprint import differs
from train.data.datasets import Batch, positions_of
from train.data.examples import DataCounts
from train.data.packing import PADDING

MANIFEST = "manifest.json"
FORMAT = "medusa features"
SHARD_BYTES = 2**28  # of hidden states; an interruption loses at most one shard
PER_TOKEN = ("input_ids", "document_ids", "loss_mask")


@dataclass(frozen=True)
class Manifest:
    """What a folder of features holds."""

    backbone: Fingerprint
    """Fingerprint of the backbone (`medusa.fingerprint`)."""
    dtype: str
    """Of the hidden states, without "torch."."""
    hidden_size: int
    rows: int | None = None
    """Rows of the dataset that was cached; `None`, as the next two, in a folder that was recorded."""
    row_length: int | None = None
    rows_per_shard: int | None = None
    format: str = FORMAT
    version: int = 1

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest in a folder."""
        content = read_json(folder / MANIFEST)
        return cls(**{field.name: content.get(field.name) for field in fields(cls)})

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, which makes it a folder of features."""
        content = {"format": self.format, "version": self.version, **vars(self)}
        write_json(folder / MANIFEST, {name: value for name, value in content.items() if value is not None})

    def same_states(self, other: Manifest) -> bool:
        """Whether both hold the hidden states of one backbone in one dtype; its name does not matter."""
        ours, theirs = self.backbone or {}, other.backbone or {}
        known = all(ours.get(key) == theirs.get(key) for key in ("weights", "dtype"))
        stored = all(getattr(self, key) == getattr(other, key) for key in ("dtype", "hidden_size", "version"))
        return known and stored


class Features(Dataset[Batch]):
    """Rows of a folder of features, as `PackedDataset` gives them, with their hidden states.

    Hidden states are mapped into memory and copied a row at a time; ids are held. A row never crosses a shard's end.
    """

    def __init__(self, folder: Path, row_length: int) -> None:
        self.folder, self.row_length = folder, row_length
        self.paths = shards(folder)
        self.tokens = [read_shard(path, *PER_TOKEN) for path in self.paths]
        self.counts = DataCounts(
            documents=sum(int((t["document_ids"].unique() >= 0).sum()) for t in self.tokens),
            tokens=sum(int((t["document_ids"] >= 0).sum()) for t in self.tokens),
            taught=sum(int(t["loss_mask"].sum()) for t in self.tokens),
        )
        self._starts = [0]  # rows before each shard, and the number of all rows
        for tensors in self.tokens:
            self._starts.append(self._starts[-1] + -(-len(tensors["input_ids"]) // row_length))
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._starts, index) - 1
        start = (index - self._starts[shard]) * self.row_length
        tokens = {name: tensor[start : start + self.row_length] for name, tensor in self.tokens[shard].items()}
        hidden = self._hidden(self.paths[shard])[start : start + self.row_length]
        missing = self.row_length - len(hidden)
        documents = padded(tokens["document_ids"].long(), missing, PADDING)
        return {
            "input_ids": padded(tokens["input_ids"].long(), missing, 0),
            "position_ids": positions_of(documents),
            "document_ids": documents,
            "loss_mask": padded(tokens["loss_mask"], missing, False),
            "hidden": padded(hidden, missing, 0),
        }

    def _hidden(self, path: Path) -> Any:
        if path not in self._open:  # opened in the process that reads: a handle cannot be sent to workers
            self._open[path] = safe_open(path, framework="pt").get_slice("hidden")
        return self._open[path]

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}


def padded(tensor: Tensor, missing: int, value: float) -> Tensor:
    """tensor [T, ...] -> [T + missing, ...], filled up with `value`."""
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), value)])


def recorded(folder: Path, row_length: int, backbone: Backbone) -> Features:
    """A folder of features as training data for `backbone`.

    Raises:
        RequestError: the features are another backbone's, or there are none.
    """
    manifest = Manifest.read(folder)
    known = manifest.backbone or {}
    if manifest.hidden_size != backbone.hidden_size or differs(backbone.model, known):
        raise RequestError(f"the features in {folder} are of another backbone, {known.get('name')}")
    features = Features(folder, row_length)
    if not features.counts.taught:
        raise RequestError(f"nothing to train on in {folder}: {features.counts}")
    return features


def is_features(path: str | Path) -> bool:
    """Whether `path` is a folder of features."""
    manifest = Path(path) / MANIFEST
    return manifest.is_file() and read_json(manifest).get("format") == FORMAT


def token_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of one token on disk: its hidden state and `PER_TOKEN`."""
    return hidden_size * dtype.itemsize + 4 + 4 + 1


def shards(folder: Path) -> list[Path]:
    """All shards in a folder, in their order."""
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdigit())


def read_shard(path: Path, *names: str) -> dict[str, Tensor]:
    """Some tensors of a shard.

    Raises:
        RequestError: the file is damaged or holds something else.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise RequestError(
            f"{path} is no shard of features ({error}); delete it, and the next run writes it again"
        ) from None


def write_shard(path: Path, hidden: Tensor, **per_token: Tensor) -> None:
    """Write one shard, whole or not at all; `per_token` are the tensors of `PER_TOKEN`."""
    tensors = {"hidden": hidden, **{name: per_token[name] for name in PER_TOKEN}}
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
