"""Tensors in the files of a folder of heads or of a model: the files' names, and reading and writing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from medusa.checkpoints.checkpoint import Tensors
from medusa.errors import RequestError, first_line
from medusa.files import read_json, replacing

CONFIG, PROVENANCE = "config.json", "provenance.json"
WEIGHTS = "medusa_lm_head.safetensors"
"""The file of the heads' weights in this project's format and in the format of TGI and LoRAX."""
LEGACY_WEIGHTS = "medusa_lm_head.pt"
"""The file of weights in the first format of FasterDecoding."""
HYDRA_WEIGHTS = "hydra_lm_head.pt"
"""The file of weights of the original Hydra."""
HEADS_FILES = (WEIGHTS, LEGACY_WEIGHTS, HYDRA_WEIGHTS)
"""All files that contain only heads, in the order in which they are looked for."""
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""The index files of a model whose weights are in several files."""


class Stored(Mapping[str, Tensor]):
    """A mapping from names to tensors in files, which are mapped into memory, because they can be large."""

    def __init__(self, places: dict[str, Path] | None = None) -> None:
        """Make a mapping from `places`, the file of each tensor. No file is read yet."""
        self.places = places or {}
        self._contents: dict[Path, Tensors] = {}  # the tensors of each file that was opened

    @classmethod
    def of_files(cls, paths: list[Path]) -> Stored:
        """Map all tensors in these files; RequestError if a file is damaged, or two contain the same tensor."""
        stored = cls()
        for path in paths:
            names = stored._content(path)
            if twice := next((name for name in names if name in stored), None):
                raise RequestError(
                    f"{stored.places[twice]} and {path.name} both hold {twice}, as if split for several GPUs; "
                    "merge them into one checkpoint"
                )
            stored.places |= dict.fromkeys(names, path)
        return stored

    @classmethod
    def of_model(cls, folder: Path) -> Stored:
        """Map a model's tensors: those in its index or, without an index, in the files with the first suffix found."""
        if (indexed := cls.of_index(folder)) is not None:
            return indexed
        for suffix in (".safetensors", ".bin", ".pt"):
            if paths := [path for path in sorted(folder.glob(f"*{suffix}")) if path.is_file()]:
                return cls.of_files(paths)
        return cls()

    @classmethod
    def of_index(cls, folder: Path) -> Stored | None:
        """Map the tensors in a model's index file; `None` without an index file, RequestError if it is damaged."""
        index = next((folder / name for name in INDICES if (folder / name).is_file()), None)
        if index is None:
            return None
        content = read_json(index)
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise RequestError(f"{index} has no weight_map of tensors and files; download it again")
        if outside := next((file for file in files.values() if Path(file).name != file), None):
            raise RequestError(f"{index} names {outside}, which is not a file in the same folder")
        return cls({tensor: folder / file for tensor, file in files.items()})

    @property
    def paths(self) -> list[Path]:
        """The paths of all files that contain tensors of this mapping, sorted."""
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

    def _content(self, path: Path) -> Tensors:
        """Open a file at its first use; return its tensors."""
        if path not in self._contents:
            self._contents[path] = _load(path)
        return self._contents[path]


def _load(path: Path) -> Tensors:
    """Map a file of tensors into memory; raise RequestError if it is damaged or contains something else."""
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
    except Exception as error:  # damage raises errors of many types
        reason = first_line(error)
        raise RequestError(f"{path} is damaged or no file of tensors ({reason}); download it again") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise RequestError(f"{path} does not hold a dictionary of tensors; heads cannot be read from it")
    return content


def _unpickled(path: Path) -> object:
    with contextlib.suppress(RuntimeError):  # files from before PyTorch 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors to a safetensors file atomically."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(ready, temporary, metadata={"format": "pt"})
