"""A dataset of rows with hidden states, read from a folder of features (`train.features.files`)."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn import functional as F
from torch.utils.data import Dataset

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.fingerprint import differs
from train.data.packing import Batch, DataCounts, as_item, padded
from train.features.files import PER_TOKEN, Manifest, read_shard, shards


class Features(Dataset[Batch]):
    """Dataset of the rows in a folder of features: rows like those of `PackedDataset`, with their hidden states.

    Token ids are held in memory. Hidden states are memory-mapped and copied one row at a time. A row never continues in
    the next shard.
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
        self._starts = [0]  # number of rows before each shard, and of all rows
        for tensors in self.tokens:
            self._starts.append(self._starts[-1] + -(-len(tensors["input_ids"]) // row_length))
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
    """Open a folder of features as training data for heads on `backbone`.

    Raises:
        RequestError: the features are of another backbone, or none of their tokens counts in the loss.
    """
    manifest = Manifest.read(folder)
    fingerprint = manifest.backbone or {}
    if manifest.hidden_size != backbone.hidden_size or differs(backbone.model, fingerprint):
        raise RequestError(f"the features in {folder} are of another backbone, {fingerprint.get('name')}")
    features = Features(folder, row_length)
    if not features.counts.taught:
        raise RequestError(f"nothing to train on in {folder}: {features.counts}")
    return features
