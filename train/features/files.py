"""Features: the frozen backbone's hidden states on disk, so that heads train without running it again.

A folder of features is a `manifest.json` and shards `00000.safetensors`, ... . A shard is whole or absent, and writers
append shards. A shard holds N tokens, documents laid end to end (H hidden size):

    hidden [N, H]        what the LM head and all Medusa heads read, in the backbone's dtype or a shorter one
    input_ids [N]        int32
    document_ids [N]     int32; which of the shard's documents a token belongs to; -1 is padding
    loss_mask [N]        bool; which tokens are taught

`train.features.cache` writes the features of a dataset, and `Recorder` those of texts in use.
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
from torch.nn import functional as F
from torch.utils.data import Dataset

from medusa.backbone import Backbone
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import free_bytes, read_json, readable, replacing, write_json
from medusa.fingerprint import differs
from train.data.datasets import Batch, as_item, padded
from train.data.examples import DataCounts

MANIFEST = "manifest.json"
FORMAT = "medusa features"
SHARD_BYTES = 2**28  # of hidden states; an interruption loses at most one shard
PER_TOKEN = ("input_ids", "document_ids", "loss_mask")


@dataclass(frozen=True)
class Manifest:
    """The content of a folder of features."""

    backbone: Fingerprint
    """Fingerprint of the backbone (`medusa.fingerprint`)."""
    dtype: str
    """Dtype of the hidden states, without "torch."."""
    hidden_size: int
    rows: int | None = None
    """Number of rows of the cached dataset; `None`, like the next two, in a recorded folder."""
    row_length: int | None = None
    rows_per_shard: int | None = None
    format: str = FORMAT
    version: int = 1

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest in a folder."""
        content = read_json(folder / MANIFEST)
        return cls(**{field.name: content.get(field.name) for field in fields(cls)})

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, which makes it a folder of features."""
        content = {"format": self.format, "version": self.version, **vars(self)}
        write_json(folder / MANIFEST, {name: value for name, value in content.items() if value is not None})

    def same_states(self, other: Manifest) -> bool:
        """Whether two manifests describe hidden states of the same backbone, under any name, in the same dtype."""
        ours, theirs = self.backbone or {}, other.backbone or {}
        known = all(ours.get(key) == theirs.get(key) for key in ("weights", "dtype"))
        return known and all(getattr(self, key) == getattr(other, key) for key in ("dtype", "hidden_size", "version"))


class Features(Dataset[Batch]):
    """Rows of a folder of features, like the rows of `PackedDataset`, with their hidden states.

    Hidden states are mapped into memory and copied one row at a time; ids are kept in memory. A row never crosses a
    shard's end.
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
        path, start = self.paths[shard], (index - self._starts[shard]) * self.row_length
        if path not in self._open:  # opened in the process that reads: a handle cannot be sent to workers
            self._open[path] = safe_open(path, framework="pt").get_slice("hidden")
        hidden = self._open[path][start : start + self.row_length]
        ids, documents, taught = (self.tokens[shard][name][start : start + self.row_length] for name in PER_TOKEN)
        row = padded(torch.stack([ids, taught.int(), documents]), self.row_length)
        return as_item(*row) | {"hidden": F.pad(hidden, (0, 0, 0, self.row_length - len(hidden)))}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_open": {}}


class Recorder:
    """Adds texts with their hidden states to a folder of features, on which heads can be trained."""

    def __init__(self, folder: Path, known: Fingerprint, hidden_size: int, dtype: torch.dtype) -> None:
        """Prepare to write to `folder`; `known` is the backbone's fingerprint.

        Raises:
            RequestError: the folder holds other files, or features of another backbone or dtype.
        """
        self.folder, self.dtype = folder, dtype
        self.manifest = Manifest(known, str(dtype).removeprefix("torch."), hidden_size)
        self.texts = self.tokens = 0
        """Numbers of texts and tokens that this recorder has written to the folder."""
        self._texts: list[dict[str, Tensor]] = []
        if is_features(folder):
            held = Manifest.read(folder)
            if not held.same_states(self.manifest) or held.rows is not None:
                raise RequestError(
                    f"{folder} holds features of another backbone or dtype, or a cache; give another folder"
                )
        elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RequestError(f"{folder} holds files that are not features; give another folder")

    def size(self, tokens: int) -> int:
        """Bytes that a number of tokens take on disk."""
        return tokens * token_bytes(self.manifest.hidden_size, self.dtype)

    def require_space(self, tokens: int) -> None:
        """Check that the disk can hold a number of tokens.

        Raises:
            RequestError: the disk is too small.
        """
        needed, free = self.size(tokens), free_bytes(self.folder)
        if needed > free:
            raise RequestError(
                f"{tokens:,} tokens may take {readable(needed)} in {self.folder}, where {readable(free)} are free; "
                "give another folder, fewer prompts or fewer new tokens"
            )

    def add(self, input_ids: list[int], hidden: Tensor, prompt_tokens: int = 0) -> None:
        """Add one text [T], T >= 1, whose first `prompt_tokens` tokens are not taught.

        `hidden` is [T, H], or shorter if the backbone has not read the last tokens.
        """
        ids = torch.tensor(input_ids, dtype=torch.int32)
        states = F.pad(hidden.detach().to("cpu", self.dtype), (0, 0, 0, len(ids) - len(hidden)))
        taught = torch.arange(len(ids)) >= prompt_tokens
        documents = torch.full_like(ids, len(self._texts))
        self._texts.append({"hidden": states, "input_ids": ids, "document_ids": documents, "loss_mask": taught})
        if sum(text["hidden"].nbytes for text in self._texts) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the texts added since the last shard as the next shard."""
        if self._texts:
            if not is_features(self.folder):  # not earlier: a request that fails before its first text leaves no file
                self.manifest.write(self.folder)
            number = 1 + max((int(path.stem) for path in shards(self.folder)), default=-1)
            joined = {name: torch.cat([text[name] for text in self._texts]) for name in self._texts[0]}
            write_shard(self.folder / f"{number:05}.safetensors", **joined)
            self.texts, self.tokens = self.texts + len(self._texts), self.tokens + len(joined["input_ids"])
            self._texts.clear()


def recorded(folder: Path, row_length: int, backbone: Backbone) -> Features:
    """Open a folder of features as training data for `backbone`.

    Raises:
        RequestError: the features belong to another backbone, or none of their tokens is taught.
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
    """All shards in a folder, in order."""
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdigit())


def read_shard(path: Path, *names: str) -> dict[str, Tensor]:
    """Read the named tensors of a shard.

    Raises:
        RequestError: the file is damaged or is not a shard.
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
