"""Files of features: the hidden states of a frozen backbone on disk, so that heads train without running it again.

A folder of features is a `manifest.json` and shards `00000.safetensors`, `00001.safetensors`, ... . A shard is either
complete or absent, and writers only add shards. A shard holds N tokens of documents laid end to end (H hidden size):

    hidden [N, H]        inputs of the LM head and of all Medusa heads, in the backbone's dtype or a smaller one
    input_ids [N]        int32
    document_ids [N]     int32; index of each token's document within the shard; -1 is padding
    loss_mask [N]        bool; True for tokens that count in the loss

`train.features.cache` writes the features of a dataset, and `train.features.recorder` those of generated texts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import read_json, replacing, write_json

MANIFEST = "manifest.json"
FORMAT = "medusa features"
SHARD_BYTES = 2**28  # size of the hidden states in a shard; an interruption loses at most one shard
PER_TOKEN = ("input_ids", "document_ids", "loss_mask")


@dataclass(frozen=True)
class Manifest:
    """The manifest of a folder of features: which backbone computed the hidden states, and how they are stored."""

    backbone: Fingerprint
    dtype: str
    """Dtype of the stored hidden states, such as "float16"."""
    hidden_size: int
    rows: int | None = None
    """Number of rows in the cached dataset. This field and the next two are `None` for recorded features."""
    row_length: int | None = None
    rows_per_shard: int | None = None
    format: str = FORMAT
    version: int = 1

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder of features."""
        content = read_json(folder / MANIFEST)
        return cls(**{field.name: content.get(field.name) for field in fields(cls)})

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`, which makes it a folder of features."""
        content = {"format": self.format, "version": self.version, **vars(self)}
        write_json(folder / MANIFEST, {name: value for name, value in content.items() if value is not None})

    def same_states(self, other: Manifest) -> bool:
        """Whether two manifests have the same dtype and the same backbone; the backbone's name may differ."""
        ours, theirs = self.backbone or {}, other.backbone or {}
        same_backbone = all(ours.get(key) == theirs.get(key) for key in ("weights", "dtype"))
        about = attrgetter("dtype", "hidden_size", "version")
        return same_backbone and about(self) == about(other)


def is_features(path: str | Path) -> bool:
    """Whether `path` is a folder of features."""
    manifest = Path(path) / MANIFEST
    return manifest.is_file() and read_json(manifest).get("format") == FORMAT


def token_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Number of bytes that a token takes on disk: hidden state, token id, document index and loss mask."""
    return hidden_size * dtype.itemsize + 4 + 4 + 1


def shards(folder: Path) -> list[Path]:
    """Paths of all shards in a folder of features, in order."""
    return sorted(path for path in folder.glob("*.safetensors") if path.stem.isdigit())


def read_shard(path: Path, *names: str) -> dict[str, Tensor]:
    """Read the tensors called `names` from a shard; raise RequestError if the file is damaged or no shard."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        told = f"{path} is no shard of features ({error}); delete it, and the next run writes it again"
        raise RequestError(told) from None


def write_shard(path: Path, hidden: Tensor, **per_token: Tensor) -> None:
    """Write a shard of N tokens atomically: `hidden` [N, H], and by name the tensors in `PER_TOKEN`, each [N]."""
    tensors = {"hidden": hidden, **{name: per_token[name] for name in PER_TOKEN}}
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
