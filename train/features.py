"""Hidden states of the frozen backbone on disk: run it once, train heads from what it said.

A folder of features is a `manifest.json` and shards `00000.safetensors`, ...; each is whole or absent, and whoever has
more adds the next one. A shard holds N tokens, documents laid end to end (H hidden size):

    hidden [N, H]        what the LM head and all Medusa heads read, in the backbone's dtype or a shorter one
    input_ids [N]        int32
    document_ids [N]     int32; which document of the shard's a token belongs to; -1 is padding
    loss_mask [N]        bool; which tokens are taught
"""

from __future__ import annotations

import shutil
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from medusa.backbone import Backbone
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import free_bytes, read_json, readable, replacing, write_json
from medusa.fingerprint import differs
from medusa.loading import DTYPES
from train.data import Counts, PackedDataset, positions_of

if TYPE_CHECKING:
    from train.trainer import MedusaTrainer

MANIFEST = "manifest.json"
FORMAT = {"format": "medusa features", "version": 1}
SHARD_BYTES = 2**28  # of hidden states: what an interruption can cost, at most
PER_TOKEN = ("input_ids", "document_ids", "loss_mask")


class Features(Dataset[dict[str, Tensor]]):
    """Rows of a folder of features, as `PackedDataset` gives them, with their hidden states.

    Hidden states are mapped into memory and copied a row at a time; ids are held. A row never crosses a shard's end.
    """

    def __init__(self, folder: Path, row_length: int) -> None:
        self.folder, self.row_length = folder, row_length
        self.paths = shards(folder)
        self.tokens = [read_shard(path, *PER_TOKEN) for path in self.paths]
        self.counts = Counts(
            documents=sum(int((t["document_ids"].unique() >= 0).sum()) for t in self.tokens),
            tokens=sum(int((t["document_ids"] >= 0).sum()) for t in self.tokens),
            taught=sum(int(t["loss_mask"].sum()) for t in self.tokens),
        )
        self._starts = [0]  # rows before each shard, and of all
        for tensors in self.tokens:
            self._starts.append(self._starts[-1] + -(-len(tensors["input_ids"]) // row_length))
        self._open: dict[Path, Any] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = bisect_right(self._starts, index) - 1
        start = (index - self._starts[shard]) * self.row_length
        tokens = {name: tensor[start : start + self.row_length] for name, tensor in self.tokens[shard].items()}
        hidden = self._hidden(self.paths[shard])[start : start + self.row_length]
        lacking = self.row_length - len(hidden)
        documents = _padded(tokens["document_ids"].long(), lacking, -1)
        return {
            "input_ids": _padded(tokens["input_ids"].long(), lacking, 0),
            "position_ids": positions_of(documents),
            "document_ids": documents,
            "loss_mask": _padded(tokens["loss_mask"], lacking, False),
            "hidden": _padded(hidden, lacking, 0),
        }

    def _hidden(self, path: Path) -> Any:
        if path not in self._open:  # in the process that reads: a handle does not travel to workers
            self._open[path] = safe_open(path, framework="pt").get_slice("hidden")
        return self._open[path]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}


def _padded(tensor: Tensor, lacking: int, value: float) -> Tensor:
    if not lacking:
        return tensor
    return torch.cat([tensor, tensor.new_full((lacking, *tensor.shape[1:]), value)])


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
        raise RequestError(f"{path} is no shard of features ({error}); delete it, and it is made anew") from None


def write_shard(path: Path, hidden: Tensor, **per_token: Tensor) -> None:
    """One shard, whole or not at all; `per_token` are `PER_TOKEN`."""
    tensors = {"hidden": hidden, **{name: per_token[name] for name in PER_TOKEN}}
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)


class Recorder:
    """Adds texts with their hidden states to a folder of features: what real use leaves for training."""

    def __init__(self, folder: Path, known: Fingerprint, hidden_size: int, dtype: torch.dtype) -> None:
        """`known` is the backbone's fingerprint.

        Raises:
            RequestError: the folder holds something else, or features of another backbone or dtype.
        """
        self.folder, self.dtype = folder, dtype
        self.manifest = manifest_of(known, hidden_size, dtype)
        self.texts = self.tokens = 0
        """What was written to the folder, by this recorder."""
        if folder.exists() and not is_features(folder):
            if not folder.is_dir() or any(folder.iterdir()):
                raise RequestError(f"{folder} holds something else than features; give another folder")
        elif folder.exists() and (
            _stored(read_json(folder / MANIFEST)) != _stored(self.manifest) or "rows" in read_json(folder / MANIFEST)
        ):
            raise RequestError(f"{folder} holds features of another backbone or dtype, or a cache; give another folder")
        self._texts: list[dict[str, Tensor]] = []

    def size(self, tokens: int) -> int:
        """Bytes that so many tokens take."""
        return tokens * token_bytes(self.manifest["hidden_size"], self.dtype)

    def require_space(self, tokens: int) -> None:
        """Raises:
        RequestError: the disk cannot hold so many tokens."""
        needed, free = self.size(tokens), free_bytes(self.folder)
        if needed > free:
            raise RequestError(
                f"{tokens:,} tokens may take {readable(needed)} in {self.folder}, where {readable(free)} are free; "
                "give another folder, fewer prompts or fewer new tokens"
            )

    def add(self, input_ids: list[int], hidden: Tensor, prompt_tokens: int = 0) -> None:
        """One text: ids [T] and hidden [T or fewer, H], since the last tokens may not have been read; T >= 1.

        The prompt's tokens are not taught.
        """
        ids = torch.tensor(input_ids, dtype=torch.int32)
        states = _padded(hidden.detach().to("cpu", self.dtype), len(ids) - len(hidden), 0)
        taught = torch.arange(len(ids)) >= prompt_tokens
        documents = torch.full_like(ids, len(self._texts))
        self._texts.append({"hidden": states, "input_ids": ids, "document_ids": documents, "loss_mask": taught})
        if sum(text["hidden"].nbytes for text in self._texts) >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added since the last shard as the next one."""
        if self._texts:
            if not is_features(self.folder):  # not before: a request that comes to nothing leaves nothing
                write_json(self.folder / MANIFEST, self.manifest)
            number = 1 + max((int(path.stem) for path in shards(self.folder)), default=-1)
            joined = {name: torch.cat([text[name] for text in self._texts]) for name in self._texts[0]}
            write_shard(self.folder / f"{number:05}.safetensors", **joined)
            self.texts, self.tokens = self.texts + len(self._texts), self.tokens + len(joined["input_ids"])
            self._texts.clear()


def recorded(folder: Path, row_length: int, backbone: Backbone) -> Features:
    """A folder of features as training data for `backbone`.

    Raises:
        RequestError: they are another backbone's, or there are none.
    """
    held = read_json(folder / MANIFEST)
    known = held.get("backbone") or Fingerprint()
    if held.get("hidden_size") != backbone.hidden_size or differs(backbone.model, known):
        raise RequestError(f"the features in {folder} are of another backbone, {known.get('name')}")
    features = Features(folder, row_length)
    if not features.counts.taught:
        raise RequestError(f"nothing to train on in {folder}: {features.counts}")
    return features


def _weights(manifest: dict[str, Any]) -> Any:
    return (manifest.get("backbone") or {}).get("weights")


def _stored(manifest: dict[str, Any]) -> tuple[Any, ...]:
    return (_weights(manifest), *(manifest.get(key) for key in ("format", "version", "dtype", "hidden_size")))


def manifest_of(known: Fingerprint, hidden_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """What every manifest says: the format, the backbone's fingerprint, and how its hidden states are stored."""
    return FORMAT | {"backbone": known, "dtype": str(dtype).removeprefix("torch."), "hidden_size": hidden_size}


def token_bytes(hidden_size: int, dtype: torch.dtype) -> int:
    """Of one token on disk: its hidden state and `PER_TOKEN`."""
    return hidden_size * dtype.itemsize + 4 + 4 + 1


def is_features(path: str | Path) -> bool:
    """Whether `path` is a folder of features."""
    manifest = Path(path) / MANIFEST
    return manifest.is_file() and read_json(manifest).get("format") == FORMAT["format"]


@dataclass(frozen=True)
class Plan:
    """What features would take and save; known before anything is written."""

    tokens: int
    missing_bytes: int
    """Of hidden states, ids and masks that are still to be written."""
    free_bytes: int
    backbone_seconds: float
    """Of a training step, in the backbone's forward: what features save."""
    heads_seconds: float
    """Of a training step, in everything else."""
    epochs: float

    @property
    def saved_per_epoch(self) -> float:
        """Share of every epoch after the first."""
        return self.backbone_seconds / (self.backbone_seconds + self.heads_seconds)

    @property
    def saved(self) -> float:
        """Share of the whole run: the backbone still runs once."""
        return max(0.0, 1 - 1 / self.epochs) * self.saved_per_epoch

    def __str__(self) -> str:
        return (
            f"features: {self.tokens:,} tokens, {readable(self.missing_bytes)} to write, "
            f"{readable(self.free_bytes)} free; "
            f"they save {self.saved_per_epoch:.0%} of every epoch after the first, {self.saved:.0%} of this run "
            f"({self.epochs:.3g} epochs)"
        )

    def require_space(self, folder: Path) -> None:
        """Raises:
        RequestError: the disk cannot hold them."""
        if self.missing_bytes > self.free_bytes:
            raise RequestError(
                f"features would take {readable(self.missing_bytes)} in {folder}, "
                f"where {readable(self.free_bytes)} are free; "
                "leave cache_features out, give another features_dir, or features_dtype: float16"
            )


class FeatureCache:
    """Features of one dataset: planned, written where they are missing, and read."""

    def __init__(
        self, folder: Path, rows: PackedDataset, backbone: Backbone, known: Any, dtype: str | None = None
    ) -> None:
        """`known` is the backbone's fingerprint; `dtype` is how hidden states are stored, if not in the backbone's own.

        Raises:
            RequestError: no such dtype.
        """
        if dtype is not None and dtype not in DTYPES:
            raise RequestError(f"features_dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
        self.folder, self.rows, self.backbone = folder, rows, backbone
        self.dtype = DTYPES[dtype] if dtype else self.backbone.dtype
        self.row_length = rows.input_ids.shape[1]
        self.row_bytes = self.row_length * token_bytes(self.backbone.hidden_size, self.dtype)
        self.rows_per_shard = max(1, min(len(rows), SHARD_BYTES // self.row_bytes))
        self.manifest = manifest_of(known, backbone.hidden_size, self.dtype) | {
            "rows": len(rows),
            "row_length": self.row_length,
            "rows_per_shard": self.rows_per_shard,
        }

    def shard_rows(self) -> Iterator[tuple[Path, slice]]:
        """Every shard's file and the rows that it holds, written or not."""
        for number, start in enumerate(range(0, len(self.rows), self.rows_per_shard)):
            yield self.folder / f"{number:05}.safetensors", slice(start, start + self.rows_per_shard)

    def require_belonging(self, replace: bool = False) -> None:
        """See that what lies in the folder are these features, or a part of them; `replace` deletes what is not.

        Raises:
            RequestError: they are another backbone's, or of other data, or damaged.
        """
        try:
            self._compare()
        except RequestError:
            if not replace or not is_features(self.folder):  # nothing but features is ever deleted
                raise
            shutil.rmtree(self.folder)

    def _compare(self) -> None:
        if self.folder.is_dir() and any(self.folder.iterdir()) and not is_features(self.folder):
            raise RequestError(f"{self.folder} holds something else than features; give another features_dir")
        if not is_features(self.folder):
            return
        held = read_json(self.folder / MANIFEST)
        for what, key in (("another backbone or dtype of it", "backbone"), ("another dtype", "dtype")):
            if _identity(held.get(key)) != _identity(self.manifest[key]):
                raise self._foreign(what)
        if held != self.manifest | {"backbone": held.get("backbone")}:
            raise self._foreign("other data")
        for path, rows in self.shard_rows():
            if path.is_file():
                stored, wanted = read_shard(path, *PER_TOKEN), self._tokens(rows)
                if not all(torch.equal(stored[name], wanted[name]) for name in PER_TOKEN):
                    raise self._foreign("other data")

    def _foreign(self, what: str) -> RequestError:
        return RequestError(
            f"the features in {self.folder} are of {what}; give another features_dir, or --overwrite to replace them"
        )

    def _tokens(self, rows: slice) -> dict[str, Tensor]:
        return {name: getattr(self.rows, name)[rows].flatten() for name in PER_TOKEN}

    @property
    def missing_rows(self) -> int:
        """Rows of all shards that are not written yet."""
        return sum(len(range(len(self.rows))[rows]) for path, rows in self.shard_rows() if not path.is_file())

    def plan(self, trainer: MedusaTrainer) -> Plan:
        """Time a few steps, the backbone's part of them and the rest, and count bytes."""
        args, forwards = trainer.args, []

        def timed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            start = time.perf_counter()
            batch = self._with_hidden(batch)
            batch["hidden"][-1, -1, -1].item()  # waits for the device
            forwards.append(time.perf_counter() - start)
            return batch

        heads = trainer.seconds_per_step(timed)
        steps = args.max_steps if trainer.budget is None else trainer.budget.seconds / heads
        rows_per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        epochs = steps * rows_per_step / len(self.rows) if steps > 0 else args.num_train_epochs
        return Plan(
            tokens=len(self.rows) * self.row_length,
            missing_bytes=self.missing_rows * self.row_bytes,
            free_bytes=free_bytes(self.folder),
            backbone_seconds=min(forwards) * args.gradient_accumulation_steps,
            heads_seconds=heads,
            epochs=epochs,
        )

    @torch.no_grad()
    def _with_hidden(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.backbone.hidden_states(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
        return batch | {"hidden": hidden.to(self.dtype)}

    def write(self, batch_size: int, process: int = 0, processes: int = 1) -> Iterator[int]:
        """Write what is missing of every `processes`-th shard from number `process` on; yields rows when done."""
        if process == 0 and not is_features(self.folder):
            write_json(self.folder / MANIFEST, self.manifest)
        for path, rows in list(self.shard_rows())[process::processes]:
            if path.is_file():
                continue
            hidden, numbers = [], range(len(self.rows))[rows]
            for start in range(0, len(numbers), batch_size):
                batch = [self.rows[number] for number in numbers[start : start + batch_size]]
                stacked = {name: torch.stack([row[name] for row in batch]) for name in ("input_ids", "position_ids")}
                stacked = {name: tensor.to(self.backbone.device) for name, tensor in stacked.items()}
                hidden.append(self._with_hidden(stacked)["hidden"].flatten(0, 1).cpu())
                yield len(batch)
            write_shard(path, torch.cat(hidden), **self._tokens(rows))

    def read(self) -> Features:
        """The rows with their hidden states, once all are written."""
        features = Features(self.folder, self.row_length)
        if len(features) != len(self.rows):
            raise RequestError(f"{self.folder} holds {len(features)} of {len(self.rows)} rows; run again to write them")
        features.counts = self.rows.counts
        return features


def _identity(known: Any) -> Any:
    """What of a fingerprint says which numbers a backbone gives: not what it is called."""
    return (known.get("weights"), known.get("dtype")) if isinstance(known, dict) else known
