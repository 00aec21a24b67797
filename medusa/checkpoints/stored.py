"""Tensors in the files of a folder, by name. Each is read when it is asked for, so that files can be large."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from medusa.errors import RequestError, first_line
from medusa.files import read_json

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Indices of models in several files."""
SUFFIXES = (".safetensors", ".bin", ".pt")
"""Formats of tensors; of a folder only files of the first one that it has are read."""

Pickled = dict[Path, dict[str, Tensor]]
"""Pickled files that were read, with all their tensors."""


class Stored(Mapping[str, Tensor]):
    """Names of tensors, and the files that hold them."""

    def __init__(self, folder: Path, places: dict[str, Path], pickled: Pickled) -> None:
        self.folder, self.places, self._pickled = folder, places, pickled
        self.paths = sorted(set(places.values()))

    @classmethod
    def of_files(cls, folder: Path, paths: list[Path]) -> Stored:
        """All tensors of these files.

        Raises:
            RequestError: a file is damaged or holds no tensors, or two files hold the same one.
        """
        pickled: Pickled = {}
        places: dict[str, Path] = {}
        for path in paths:
            names = _names(path, pickled)
            if twice := next((name for name in names if name in places), None):
                raise RequestError(
                    f"{places[twice]} and {path.name} both hold {twice}, as files for several GPUs do; convert for one"
                )
            places |= dict.fromkeys(names, path)
        return cls(folder, places, pickled)

    @classmethod
    def of_model(cls, folder: Path) -> Stored:
        """The tensors that a model's index lists; without an index, those of its files.

        Raises:
            RequestError: as `of_files`, or a damaged index.
        """
        for name in INDICES:
            if (folder / name).is_file():
                return cls(folder, {tensor: folder / file for tensor, file in read_index(folder / name).items()}, {})
        found = ([path for path in sorted(folder.glob(f"*{suffix}")) if path.is_file()] for suffix in SUFFIXES)
        return cls.of_files(folder, next((paths for paths in found if paths), []))

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor; raise RequestError if its file is damaged or missing."""
        path = self.places[name]
        if not path.is_file():
            raise RequestError(f"{path} does not exist, and should hold {name}; download it")
        if path.suffix != ".safetensors":
            if path not in self._pickled:
                _names(path, self._pickled)
            if name not in self._pickled[path]:
                raise RequestError(f"{path} does not hold {name}, though its index says so; download it again")
            return self._pickled[path][name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except Exception as error:  # see _names
            raise _damaged(path, error) from None


def _names(path: Path, pickled: Pickled) -> list[str]:
    """The names of a file's tensors; the content of a pickled file is kept in `pickled`."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        content = _unpickled(path)
    except Exception as error:  # unpickling a damaged file raises errors of many types
        raise _damaged(path, error) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise RequestError(f"{path} does not hold a dictionary of tensors; heads cannot be read from it")
    pickled[path] = content
    return list(content)


def read_index(path: Path) -> dict[str, str]:
    """The file in the same folder that holds each tensor, by its name; raise RequestError for a damaged index."""
    content = read_json(path)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise RequestError(f"{path} has no weight_map of tensors and files; download it again")
    for place in places.values():
        if Path(place).name != place:
            raise RequestError(f"{path} names {place}, which is not a file in the same folder")
    return places


def _unpickled(path: Path) -> object:
    if path.suffix == ".bin":  # of a whole model
        with contextlib.suppress(RuntimeError):  # files of before PyTorch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def _damaged(path: Path, error: Exception) -> RequestError:
    return RequestError(f"{path} is damaged or no file of tensors ({first_line(error)}); download it again")
