"""Heads as data: a config, tensors and a provenance, which are the same for all file formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads import class_of

Tensors = dict[str, Tensor]
SCALES = ("_scale", "_scale_inv", "_scaling_factor", "_amax", ".scales", ".qzeros")
"""Endings of the names of tensors that belong to quantised weights."""


@dataclass
class Checkpoint:
    """The config, tensors and provenance of a set of heads, read from a folder or ready to be written."""

    config: MedusaConfig
    tensors: Tensors  # the state dict of the module (`medusa.heads`)
    provenance: Json | None = None  # the content of `provenance.json`: recipe, data, versions and results

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which heads compute: that of all tensors, or if they have several, one that holds them all."""
        first, *others = {tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point()}
        if not others:
            return first
        return torch.float64 if torch.float64 in (first, *others) else torch.float32

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values() if tensor.is_floating_point())

    def is_same(self, other: Checkpoint) -> bool:
        """Whether both sets of heads have the same kind, the same type of block and bitwise equal tensors."""
        kinds = [(heads.config.kind, heads.config.block, heads.tensors.keys()) for heads in (self, other)]
        return kinds[0] == kinds[1] and all(torch.equal(t, other.tensors[name]) for name, t in self.tensors.items())

    def to(self, dtype: torch.dtype) -> Checkpoint:
        """Return a copy of this checkpoint with all floating-point tensors converted to `dtype`."""
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        return replace(self, tensors=cast)

    def require_complete(self, source: str) -> Checkpoint:
        """Return this checkpoint; raise RequestError if a tensor is unknown, missing or of the wrong shape.

        The token ids of a reduced vocabulary must be valid and unique. Error messages begin with `source`, the file."""
        # Before modules are made: a million of them takes minutes.
        require_plausible(self.tensors, source, **class_of(self.config.kind).module_counts(self.config))
        require_exactly(self.tensors, empty(self.config).tensors, source)
        if (tokens := self.tensors.get("vocabulary")) is not None:
            vocab_size = self.config.vocab_size
            assert vocab_size is not None, "the config requires it with a vocabulary"
            if tokens.dtype != torch.int64:
                raise RequestError(f"{source}: vocabulary is {tokens.dtype}; it must be a list of token ids (int64)")
            if tokens.min() < 0 or tokens.max() >= vocab_size or len(tokens.unique()) < len(tokens):
                raise RequestError(f"{source}: vocabulary must name tokens below {vocab_size}, each once")
        return self


def empty(config: MedusaConfig) -> Checkpoint:
    """Make a checkpoint for a config with tensors on the meta device, which have names and shapes but no values."""
    with torch.device("meta"):
        return Checkpoint(config, class_of(config.kind)(config).state_dict())


def require_exactly(tensors: Tensors, wanted: Tensors, source: str, called: Callable[[str], str] = str) -> None:
    """Raise RequestError unless `tensors` have exactly the names and shapes of `wanted`, and floats where these do.

    Error messages begin with `source`, and `called` converts a name in `tensors` to the name in the file."""
    unknown = sorted(set(tensors) - set(wanted))
    require_unquantised({called(name): its for name, its in tensors.items()}, source, map(called, unknown))
    for name, like in wanted.items():
        if name not in tensors:
            raise RequestError(f"{source} misses the tensor {called(name)}; its heads are not complete")
        if (found := tensors[name].shape) != like.shape:
            raise RequestError(f"{source}: {called(name)} has the shape {list(found)}, not {list(like.shape)}")
        if like.is_floating_point() and not tensors[name].is_floating_point():
            raise RequestError(f"{source}: {called(name)} is {tensors[name].dtype}; only floats can be loaded")
    if unknown:
        raise RequestError(f"{source} holds the tensor {called(unknown[0])}, which belongs to no head; remove it")


def require_unquantised(tensors: Tensors, source: str, others: Iterable[str]) -> None:
    """Raise RequestError if the names of `others` show scaling factors of quantised weights, or numbers have 8 bits."""
    found = next((name for name in others if name.endswith(SCALES)), None)
    found = found or next((n for n, its in tensors.items() if its.is_floating_point() and its.itemsize == 1), None)
    if found is not None:
        raise RequestError(f"{source} holds {found}: its weights are quantised; use the unquantised ones")


def require_plausible(tensors: Tensors, source: str, **counts: int) -> None:
    """Raise RequestError if a tensor is a single number or empty, or file `source` names more heads than tensors.

    The same holds for the other `counts`, such as blocks. Call this before reading sizes and making modules."""
    for name, tensor in tensors.items():
        if tensor.ndim == 0 or tensor.numel() == 0:
            raise RequestError(f"{source}: {name} has the shape {list(tensor.shape)}; heads are matrices and vectors")
    for part, count in counts.items():
        if count > (held := len(tensors)):
            missing = f"{source} names {part} {count - 1} but holds {held} tensors"
            raise RequestError(f"{missing}; its heads are not complete")
