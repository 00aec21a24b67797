"""Tensors in the files of a folder of heads or of a model: the files' names, and reading and writing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors
from medusa.errors import RequestError, first_line
from medusa.files import Json, read_json, replacing

CONFIG, PROVENANCE = "config.json", "provenance.json"
WEIGHTS = "medusa_lm_head.safetensors"  # the format of this project, TGI and LoRAX
LEGACY_WEIGHTS = "medusa_lm_head.pt"  # the first format of FasterDecoding
HYDRA_WEIGHTS = "hydra_lm_head.pt"  # the format of the original Hydra
HEADS_FILES = (WEIGHTS, LEGACY_WEIGHTS, HYDRA_WEIGHTS)  # in the order in which they are looked for
MASK_EMBEDDING = "mask_embedding.pt"  # a vector beside the tensors of some block drafters
DAMAGED = "{} is damaged or no file of tensors ({}); get it again"
NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")  # how the names of a Trainer's other files begin
MODELS = ("model.safetensors", "pytorch_model.bin")  # of models in one file, in the order of transformers
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")  # of models in several files


class Form(NamedTuple):
    """A form in which another program publishes heads of one kind (`medusa.heads.kind.Kind.published_form`)."""

    recognises: Callable[[Stored], bool]  # whether stored tensors have this form
    read: Callable[[Stored, Json, str, str], Checkpoint]
    """Makes heads from the tensors, the content of their `config.json`, the name of their file for messages, and the
    folder or Hub id that the user gave."""


class Stored(Mapping[str, Tensor]):
    """A mapping from names to tensors. `places` gives the file of each; a file is mapped into memory at first use."""

    def __init__(self, places: dict[str, Path]) -> None:
        self.places = places
        self._content = cache(_load)

    @classmethod
    def of_files(cls, paths: list[Path]) -> Stored:
        """Find all tensors in these files; RequestError if a file is damaged, or two files hold tensors of one name."""
        stored = cls({})
        for path in paths:
            for name in stored._content(path):
                if name in stored:
                    both = f"{stored.places[name]} and {path.name} both hold {name}, as if split for several GPUs"
                    raise RequestError(f"{both}; merge them into one checkpoint")
                stored.places[name] = path
        return stored

    @classmethod
    def of_model(cls, folder: Path) -> Stored:
        """Find the tensors in the files that transformers loads of a folder; empty if it holds none of them."""
        for whole, index in zip(MODELS, INDICES, strict=True):
            if (folder / whole).is_file():
                return cls.of_files([folder / whole])
            if (folder / index).is_file():
                return cls._indexed(folder / index)
        return cls({})

    @classmethod
    def of_folder(cls, folder: Path) -> Stored:
        """Find the tensors of a model that has an index, else all in .safetensors files, else in .bin or .pt files."""
        if any((folder / index).is_file() for index in INDICES):
            return cls.of_model(folder)
        files = [path for path in sorted(folder.glob("*")) if path.is_file() and not path.name.startswith(NO_WEIGHTS)]
        for suffix in (".safetensors", ".bin", ".pt"):
            if paths := [path for path in files if path.suffix == suffix]:
                return cls.of_files(paths)
        return cls({})

    @classmethod
    def of_index(cls, folder: Path) -> Stored | None:
        """Find the tensors that a model's index file lists; RequestError if it is damaged.

        Return `None` without an index, or if a whole model is there, which transformers prefers."""
        for whole, index in zip(MODELS, INDICES, strict=True):
            if (folder / whole).is_file():
                return None
            if (folder / index).is_file():
                return cls._indexed(folder / index)
        return None

    @classmethod
    def _indexed(cls, index: Path) -> Stored:
        content, folder = read_json(index), index.parent
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise RequestError(f"{index} has no weight_map of tensors and files; download it again")
        if outside := next((file for file in files.values() if Path(file).name != file), None):
            raise RequestError(f"{index} names {outside}, which is not a file in the same folder")
        return cls({tensor: folder / file for tensor, file in files.items()})

    @property
    def paths(self) -> list[Path]:
        """The paths of all files, sorted."""
        return sorted(set(self.places.values()))

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor with this name; raise RequestError if the tensor's file is missing or damaged."""
        path = self.places[name]
        if not path.is_file():
            raise RequestError(f"{path} does not exist, and should hold {name}; download it")
        content = self._content(path)
        if name not in content:
            raise RequestError(f"{path} does not hold {name}, though its index says so; download it again")
        return content[name]


def _load(path: Path) -> Tensors:
    """Map a file of tensors into memory; raise RequestError if it is damaged or contains anything but tensors."""
    try:
        content: object = load_file(path) if path.suffix == ".safetensors" else load_pickled(path)
    except RequestError:
        raise
    except Exception as error:  # damage raises errors of many types
        raise RequestError(DAMAGED.format(path, first_line(error))) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise RequestError(f"{path} does not hold a dictionary of tensors; heads cannot be read from it")
    return content


def load_pickled(path: Path) -> object:
    """Map a file of `torch.save` into memory; raise RequestError if it is damaged or holds anything but data."""
    try:  # files from before PyTorch 1.6 are no zip archives, and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:
        raise RequestError(DAMAGED.format(path, first_line(error))) from None


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors to a safetensors file atomically."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(ready, temporary, metadata={"format": "pt"})
