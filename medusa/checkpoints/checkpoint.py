"""A set of heads as data: config, tensors and provenance, whatever the format of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.kinds import class_of

Tensors = dict[str, Tensor]


@dataclass
class Checkpoint:
    """A set of heads as data, read from a folder or to be written into one."""

    config: MedusaConfig
    tensors: Tensors
    """The state dict of the heads' modules."""
    provenance: Json | None = None
    """The content of `provenance.json`: recipe, data, versions and results; `None` if the heads came without one."""

    @property
    def dtype(self) -> torch.dtype:
        return next(tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point())

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values() if tensor.is_floating_point())

    def is_same(self, other: Checkpoint) -> bool:
        """Whether the other heads have the same kind and, bit for bit, the same tensors."""
        kinds = [(heads.config.kind, heads.config.block, heads.tensors.keys()) for heads in (self, other)]
        return kinds[0] == kinds[1] and all(torch.equal(t, other.tensors[name]) for name, t in self.tensors.items())

    def to(self, dtype: torch.dtype) -> Checkpoint:
        """The same heads with their weights in `dtype`."""
        cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        return replace(self, tensors=cast)


def empty(config: MedusaConfig) -> Checkpoint:
    """Heads whose tensors have names and shapes, but no memory and no values (torch's meta device)."""
    with torch.device("meta"):
        return Checkpoint(config, class_of(config.kind)(config).state_dict())


def require_exactly(
    tensors: Mapping[str, Tensor], wanted: Tensors, source: str, called: Callable[[str], str] = str
) -> None:
    """Check that `tensors` have the names and shapes of those `wanted`, neither more nor fewer.

    Args:
        source: the file or folder, for messages.
        called: gives the name of a tensor in that file, for messages.

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


def require_vocabulary(tokens: Tensor, config: MedusaConfig, source: str) -> None:
    """Raise RequestError unless the tokens that heads guess among are token ids of the backbone, each once."""
    if tokens.dtype != torch.int64:
        raise RequestError(f"{source}: vocabulary is {tokens.dtype}; it must be a list of token ids (int64)")
    assert config.vocab_size is not None, "refused by the config"
    if tokens.min() < 0 or tokens.max() >= config.vocab_size or len(tokens.unique()) < len(tokens):
        raise RequestError(f"{source}: vocabulary must name tokens below {config.vocab_size}, each once")
