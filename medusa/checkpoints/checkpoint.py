"""Heads as data: config, tensors and provenance, independent of the files' format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads import class_of

Tensors = dict[str, Tensor]
"""Tensors by name."""


@dataclass
class Checkpoint:
    """A set of heads as data, read from a folder or to be written into one."""

    config: MedusaConfig
    tensors: Tensors
    """The state dict of the heads' modules."""
    provenance: Json | None = None
    """The content of `provenance.json`: recipe, data, versions and results; `None` if there is no such file."""

    @property
    def dtype(self) -> torch.dtype:
        return next(tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point())

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values() if tensor.is_floating_point())

    def is_same(self, other: Checkpoint) -> bool:
        """Whether both sets of heads have the same kind and, bit for bit, the same tensors."""
        kinds = [(heads.config.kind, heads.config.block, heads.tensors.keys()) for heads in (self, other)]
        return kinds[0] == kinds[1] and all(torch.equal(t, other.tensors[name]) for name, t in self.tensors.items())

    def to(self, dtype: torch.dtype) -> Checkpoint:
        """The same heads with their weights in `dtype`."""
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        return replace(self, tensors=cast)

    def require_complete(self, source: str) -> Checkpoint:
        """Return these heads after a check of their tensors' names, shapes and vocabulary.

        Raises:
            RequestError: a tensor of the file `source` is missing, unknown, of the wrong shape, or holds tokens that
                the backbone does not have.
        """
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
    """Heads whose tensors have names and shapes, but no memory and no values (torch's meta device)."""
    with torch.device("meta"):
        return Checkpoint(config, class_of(config.kind)(config).state_dict())


def require_exactly(
    tensors: Mapping[str, Tensor], wanted: Tensors, source: str, called: Callable[[str], str] = str
) -> None:
    """Check that `tensors` have exactly the names and shapes of the tensors `wanted`.

    Args:
        source: the file or folder that error messages name.
        called: maps a tensor's name to its name in that file, for error messages.

    Raises:
        RequestError: a tensor is missing, unknown or of the wrong shape.
    """
    for name, like in wanted.items():
        if name not in tensors:
            raise RequestError(f"{source} misses the tensor {called(name)}; its heads are not complete")
        if (found := tensors[name].shape) != like.shape:
            raise RequestError(f"{source}: {called(name)} has the shape {list(found)}, not {list(like.shape)}")
    unknown = sorted(set(tensors) - set(wanted))
    if unknown:
        raise RequestError(f"{source} holds the tensor {called(unknown[0])}, which belongs to no head; remove it")


def require_plausible(num_heads: int, tensors: Tensors, source: str) -> None:
    """Raise RequestError if a file names more heads than it holds tensors, before memory is asked for so many."""
    if num_heads > len(tensors):
        raise RequestError(
            f"{source} names head {num_heads - 1} but holds {len(tensors)} tensors; its heads are not complete"
        )
