"""Files of features: the hidden states of a frozen backbone on disk, so that heads train without running it again.

A folder of features is a `manifest.json` and shards `00000.safetensors`, `00001.safetensors`, ... . A shard is either
complete or absent, and writers only add shards. A shard holds N tokens of documents laid end to end (H hidden size):

    hidden [N, H]        inputs of the LM head and of all Medusa heads, in the backbone's dtype or a shorter one
    input_ids [N]        int32
    document_ids [N]     int32; index of each token's document within the shard; -1 is padding
    loss_mask [N]        bool; True for tokens that count in the loss

`train.features.cache` writes the features of a dataset, and `train.features.recorder` those of generated texts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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
