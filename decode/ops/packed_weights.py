"""Packed weights: a second copy of linear layers' weights, in the order in which oneDNN multiplies them.

Without a copy, oneDNN rearranges a weight in each product, which takes half of the time with 8 tokens. The weights of a
model are packed when its first text begins, if the copies fit in `SHARE` of the memory. A weight may change later, and
not all changes are counted by PyTorch (`weight.data += delta` is not). So each text begins with a check: the product of
each weight and one vector must be the same, bit by bit, as when the weight was packed. This reads the weights once. An
uncounted change is missed only if it is so small that rounding hides it in the sums of all rows that it changed.

Shapes: K inputs, N outputs of a linear layer."""

from __future__ import annotations

import weakref
from functools import cache, partial
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.memory import total_memory

MIN_NUMBERS = 1 << 16
"""Size of a weight from which packing pays in drafts of 8 tokens."""
SHARE = 1 / 8
"""Part of the memory that the packed weights of one model may fill."""
PLAIN_TYPES = (Tensor, nn.Parameter)  # subclasses, for example quantised weights, have their own products


class Packed(NamedTuple):
    """A packed weight [N, K]."""

    of: weakref.ref[Tensor]
    version: int  # how often the weight had been written to
    sums: Tensor  # [N] its product with `_vector`
    copy: Tensor  # the weight in oneDNN's order


_PACKED: dict[int, Packed] = {}  # by the identity of the weight, because a search by a weak reference takes longer
_LOCK = Lock()


def packed(weight: Tensor) -> Tensor | None:
    """Return the packed copy of `weight`, or `None` if there is none or the weight has been written to since."""
    found = _PACKED.get(id(weight))
    if found is None or found.of() is not weight or found.version != weight._version:
        return None
    return found.copy


def pack(model: nn.Module) -> None:
    """Pack the weights of the linear layers of `model` that are not packed yet, or have changed since.

    Copies are dropped whose weights may no longer be packed, for example after `model.to(...)`."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    weights = {id(weight): weight for weight in map(weight_of, layers) if weight is not None}
    if sum(weight.nbytes for weight in weights.values()) > _limit():
        weights = {}
    for key in {id(layer.weight) for layer in layers} - weights.keys():
        _PACKED.pop(key, None)
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        for key, weight in weights.items():
            sums, found = torch.mv(weight, _vector(weight.shape[1])), _PACKED.get(key)
            if found is None or found.of() is not weight or not torch.equal(found.sums, sums):
                copy = torch.ops.mkldnn._reorder_linear_weight(weight)
                _PACKED[key] = Packed(weakref.ref(weight, partial(_forget, key)), weight._version, sums, copy)
            elif found.version != weight._version:  # written to, but with the same numbers
                _PACKED[key] = found._replace(version=weight._version)


def weight_of(layer: nn.Module) -> Tensor | None:
    """Return the weight of a linear layer whose products packing makes faster; `None` for all other modules."""
    if not isinstance(layer, nn.Linear) or type(layer.weight) not in PLAIN_TYPES:
        return None
    weight = layer.weight
    fits = weight.dtype == torch.float32 and weight.is_cpu and weight.is_contiguous() and not weight.is_inference()
    return weight if fits and weight.numel() >= MIN_NUMBERS else None


@cache
def _limit() -> float:
    """The number of bytes that the packed weights of a model may fill."""
    return SHARE * total_memory(torch.device("cpu"))


@cache
def _vector(size: int) -> Tensor:
    """A vector of `size` different numbers. Zeros in a weight change no sum, but neither do they change a product."""
    return torch.linspace(1, 2, size, dtype=torch.float32, device="cpu")  # whatever the defaults of the caller are


def _forget(key: int, of: weakref.ref[Tensor]) -> None:
    """Drop the copy of a weight that is no more. Takes no lock: a garbage collection inside of `pack` may call this."""
    found = _PACKED.get(key)
    if found is not None and found.of is of:
        _PACKED.pop(key, None)
