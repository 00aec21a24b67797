"""Tensors in the files of a folder, by name; each is read when it is asked for, however large the files are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from medusa.errors import RequestError
from medusa.files import read_json

INDICES = (  # of models in several files
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
SUFFIXES = (".safetensors", ".bin", ".pt")  # what is there of the first is read


class Stored(Mapping[str, Tensor]):
    """Names of tensors and the files that they lie in."""

    def __init__(self, folder: Path, places: dict[str, Path], pickled: dict[Path, dict[str, Tensor]]) -> None:
        self.folder, self.places, self._pickled = folder, places, pickled
        self.paths = sorted(set(places.values()))

    @classmethod
    def of_files(cls, folder: Path, paths: list[Path]) -> Stored:
        """Raises:
        RequestError: a file is damaged, is none of tensors, or holds what another one holds."""
        pickled: dict[Path, dict[str, Tensor]] = {}
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
        """What a model's index lists, and where it has none, what its files hold.

        Raises:
            RequestError: as above, or an index that is none.
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
        """Raises:
        RequestError: the file is damaged, or not there."""
        path = self.places[name]
        if not path.is_file():
            raise RequestError(f"{path} is not there, though it is to hold {name}; fetch it")
        if path.suffix != ".safetensors":
            if path not in self._pickled:
                _names(path, self._pickled)
            if name not in self._pickled[path]:
                raise RequestError(f"{path} does not hold {name}, though its index says so; fetch it again")
            return self._pickled[path][name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except Exception as error:  # see _names
            raise _damaged(path, error) from None


def _names(path: Path, pickled: dict[Path, dict[str, Tensor]]) -> list[str]:
    """Of the tensors of a file; those of a pickled one are kept."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        content = _unpickled(path)
    except Exception as error:  # unpickling a damaged file raises what it likes
        raise _damaged(path, error) from None
    pairs = content.items() if isinstance(content, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in pairs):
        raise RequestError(f"{path} does not hold a dictionary of tensors; heads cannot be read from it")
    pickled[path] = content
    return list(content)


def read_index(path: Path) -> dict[str, str]:
    """Names of tensors and the files beside `path` that hold them.

    Raises:
        RequestError: no index of files in its own folder.
    """
    content = read_json(path)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise RequestError(f"{path} has no weight_map of tensors and files; fetch it again")
    for place in places.values():
        if Path(place).name != place:
            raise RequestError(f"{path} names {place}, which is not a file beside it")
    return places


def _unpickled(path: Path) -> Any:
    if path.suffix == ".bin":  # of a whole model
        with contextlib.suppress(RuntimeError):  # files of before PyTorch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def _damaged(path: Path, error: Exception) -> RequestError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RequestError(f"{path} is damaged or no file of tensors ({reason}); fetch it again")
