"""Tensors in the files of a folder of heads or of a model: the files' names, and reading and writing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
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
    """A mapping from names to tensors in files. Each tensor is read at its first use, because files can be large."""

    def __init__(self, places: dict[str, Path] | None = None) -> None:
        """Make a mapping from `places`, the file of each tensor. No file is read yet."""
        self.places = places or {}
        self._pickled: dict[Path, Tensors] = {}  # the content of each pickled file that was read

    @classmethod
    def of_files(cls, paths: list[Path]) -> Stored:
        """Map all tensors in these files; RequestError if a file is damaged, or two contain the same tensor."""
        stored = cls()
        for path in paths:
            names = stored._names(path)
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
        """Read the tensor with this name; raise RequestError if the tensor's file is missing or damaged."""
        path = self.places[name]
        if not path.is_file():
            raise RequestError(f"{path} does not exist, and should hold {name}; download it")
        if path.suffix != ".safetensors":
            if path not in self._pickled:
                self._names(path)
            if name not in self._pickled[path]:
                raise RequestError(f"{path} does not hold {name}, though its index says so; download it again")
            return self._pickled[path][name]
        with _damage_reported(path), safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
        return tensor

    def _names(self, path: Path) -> list[str]:
        """Return the names of the tensors in a file. A pickled file is read completely and cached."""
        with _damage_reported(path):
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    return list(file.keys())
            content = _unpickled(path)
        if not isinstance(content, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
        ):
            raise RequestError(f"{path} does not hold a dictionary of tensors; heads cannot be read from it")
        self._pickled[path] = content
        return list(content)


@contextlib.contextmanager
def _damage_reported(path: Path) -> Iterator[None]:
    """Turn errors inside this context, in which `path` is read, into a RequestError: damage raises many error types."""
    try:
        yield
    except Exception as error:
        raise RequestError(
            f"{path} is damaged or no file of tensors ({first_line(error)}); download it again"
        ) from None


def _unpickled(path: Path) -> object:
    """Load a pickled file of tensors. The file of a whole model is memory-mapped if possible."""
    if path.suffix == ".bin":
        with contextlib.suppress(RuntimeError):  # files from before PyTorch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return torch.load(path, map_location="cpu", weights_only=True)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors to a safetensors file atomically."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(ready, temporary, metadata={"format": "pt"})
