"""The compiled regions that a model keeps, and what a region depends on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType

import torch
from torch import nn
from transformers import PreTrainedModel

from decode.compiled.region import Region
from medusa.backbone import Backbone

KEPT = 8
"""Regions that a model keeps, each with its cache; the least recently used one is dropped first."""

Key = tuple[object, ...]


class Regions(list[tuple[Key, Region]]):
    """The regions of a model that are not in use, with their keys, the most recently used one last.

    They live as long as the model. A copy of the model starts without any.
    """

    ATTRIBUTE = "_medusa_regions"

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        """The regions of this model."""
        return vars(model).setdefault(cls.ATTRIBUTE, cls())

    def __deepcopy__(self, memo: dict[int, object]) -> Regions:
        return Regions()

    def __reduce__(self) -> tuple[type[Regions], tuple[()]]:
        return Regions, ()

    def take(self, key: Key, make: Callable[[], Region]) -> Region:
        """Take a region for this key, which then is the caller's alone; make one if there is none."""
        with self.lock:
            for place, (held, region) in enumerate(self):
                if held == key:
                    del self[place]
                    return region
        return make()

    def put_back(self, key: Key, region: Region) -> None:
        """Return a region after use."""
        with self.lock:
            self.append((key, region))
            del self[:-KEPT]


COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType, partial)


def surroundings(backbone: Backbone) -> Key:
    """What compiled code depends on outside the modules: attention, autocast, threads."""
    kind = backbone.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return backbone.config._attn_implementation, precision, torch.get_num_threads()


def state(module: nn.Module) -> Key:
    """What guards on modules would check in every step, to be checked once per session.

    For every submodule: its hooks, its parameters (tied ones are one input of the region), and all settings, such as
    train mode, active adapters, or a replaced `forward`. The values of parameters may change.
    """
    return tuple(
        (
            type(part),
            *((id(p), p.dtype, p.device) for p in part._parameters.values() if p is not None),
            *part._forward_pre_hooks.values(),
            *part._forward_hooks.values(),
            *((name, _plain(value)) for name, value in vars(part).items() if name not in COMMON_ATTRIBUTES),
        )
        for part in module.modules()
    )


def _plain(value: object) -> object:
    """A number, string or function, or a container of these; tensors, modules and caches become `None`."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict) and type(value) is dict:
        value = list(value.items())
    elif isinstance(value, set) and type(value) is set:
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return tuple(part for part in map(_plain, value) if part not in (None, ()))
    return None
