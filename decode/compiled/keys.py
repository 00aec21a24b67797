"""Keys of compiled regions: everything about modules that code is compiled for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast
from weakref import WeakMethod, ref

from torch import nn
from transformers import PretrainedConfig

from medusa.backbone import by_value

COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_is_full_backward_hook"}
"""What each module has and the key need not hold as it is. Two are left, so that `_settings` gives tuples."""
PLAIN = (bool, int, float, str, type(None))
ARE_PLAIN = frozenset(PLAIN).issuperset
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
Key = tuple[object, ...]
"""Everything that a region was compiled for; a session reuses a compiled region with an equal key."""


def modules_key(module: nn.Module) -> Key:
    """A module's part of the key of a compiled region: the hooks, parameters, settings and configs of its submodules.

    Settings are attributes such as train mode or active adapters. Parameters enter the key by identity (because tied
    parameters are one input of compiled code), dtype and device, but not by value. Configs enter it by value, and each
    of them once, although most submodules hold it."""
    configs: dict[int, object] = {}
    parts = tuple(_part(part, configs) for part in modules_of(module))
    return parts, tuple(configs.values())


def modules_of(module: nn.Module) -> list[nn.Module]:
    """List a module and its submodules, each of them once, in a fixed order; `modules()` takes three times as long."""
    found, todo = dict[int, nn.Module](), [module]
    while todo:
        part = todo.pop()
        if id(part) not in found:
            found[id(part)] = part
            todo += [child for child in part._modules.values() if child is not None]
    return [*found.values()]


def _part(part: nn.Module, configs: dict[int, object]) -> Key:
    """The part of a region's key that belongs to a module without its submodules; for `configs` see `_plain`."""
    names = tuple(vars(part))
    values = _settings(names)(vars(part))
    if not ARE_PLAIN(map(type, values)):
        values = tuple([_plain(value, configs) for value in values])
    states = [(id(p), p.dtype, p.device) for p in part._parameters.values() if p is not None]
    hooks = map(_function, (*part._forward_pre_hooks.values(), *part._forward_hooks.values()))
    return (type(part), type(part).forward, *states, *hooks, names, values)


@functools.cache
def _settings(names: tuple[str, ...]) -> Callable[[dict[str, object]], tuple[object, ...]]:
    """Make a function that reads the settings of modules whose attributes have these `names`."""
    return itemgetter(*(name for name in names if name not in COMMON_ATTRIBUTES))


def _plain(value: object, configs: dict[int, object]) -> object:
    """Convert a value for a region's key: numbers and strings stay; containers become tuples; others `None`.

    A config is added to `configs`, and is converted to its number among them."""
    kind = type(value)  # a config answers `isinstance` in Python, slowly
    if issubclass(kind, PLAIN):
        return value
    if issubclass(kind, FUNCTIONS):
        return _function(cast(FunctionType, value))
    if issubclass(kind, PretrainedConfig):
        if id(value) not in configs:
            configs[id(value)] = by_value(value)
        return list(configs).index(id(value))
    if type(value) is dict:
        value = list(value.items())
    elif type(value) is set:
        value = sorted(value, key=repr)
    if type(value) is list or type(value) is tuple:
        return tuple(part for part in (_plain(part, configs) for part in value) if part not in (None, ()))
    return None


def _function(function: Callable[..., object]) -> object:
    """A function or hook in a region's key: a reference that keeps neither the function nor its model alive."""
    return WeakMethod(function) if isinstance(function, MethodType) else ref(function)
