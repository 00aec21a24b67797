"""Record what modules of a model read and give in a forward, so that a copy made meanwhile is a clean model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident

from torch import nn
from torch.compiler import is_dynamo_compiling
from transformers import PreTrainedModel


class Recorder:
    """A hook that passes the calls of a module to `record`, in forwards of the thread that made it.

    It passes the arguments, the keyword arguments and, after the module has run, its output. A copy of a hooked module
    may hold a copy of the hook, which records nothing."""

    def __init__(self, record: Callable[..., None] | None = None) -> None:
        """Make a hook; without `record` it does nothing."""
        self.record, self.owner = record, get_ident()

    def __call__(self, module: nn.Module, *call: object) -> None:
        if self.record is not None and (is_dynamo_compiling() or get_ident() == self.owner):  # which cannot be traced
            self.record(*call)

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        return Recorder, ()


@contextmanager
def recorded(
    model: nn.Module, before: Mapping[str, Callable[..., None]], after: Mapping[str, Callable[..., None]] | None = None
) -> Iterator[nn.Module]:
    """Yield a model for forwards of this thread that pass the calls of some modules of `model`, by name, to functions.

    Functions `before` get the arguments and keyword arguments of a module; functions `after` get its output, too.

    It is a view: `model` itself has no hook, so a copy of it that another thread or hook makes is clean. But if hooks
    or another `forward` could notice the view, it is `model` with hooks."""
    names = [*before, *(after or ())]
    view = _view(model, [name.split(".") if name else [] for name in names])
    target = model if view is None else view
    handles = [
        target.get_submodule(name).register_forward_pre_hook(Recorder(function), with_kwargs=True)
        for name, function in before.items()
    ]
    handles += [
        target.get_submodule(name).register_forward_hook(Recorder(function), with_kwargs=True)
        for name, function in (after or {}).items()
    ]
    try:
        yield target
    finally:
        for handle in handles:
            handle.remove()


def names_of(model: nn.Module, part: nn.Module) -> list[str]:
    """Return all names of a module in `model`."""
    return [name for name, module in model.named_modules(remove_duplicate=False) if module is part]


def _view(module: nn.Module, paths: Sequence[Sequence[str]]) -> nn.Module | None:
    """Return a copy of `module` that shares all but the modules on these `paths` from it, whose hooks are its own.

    Return `None` if hooks, or another `forward`, of one of them could notice that. So could transformers: if a config
    asks for outputs of layers, the first forward hooks all layers, and notes so in the module that it runs."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    asked = vars(module.config).items() if isinstance(module, PreTrainedModel) else ()
    if hooks or any(value and "output_" in name for name, value in asked):
        return None
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return None
    view = object.__new__(type(module))  # because parametrized modules refuse `copy.copy`
    own = ("_modules", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    vars(view).update(vars(module))
    vars(view).update({name: vars(module)[name].copy() for name in (*own, "_forward_hooks_with_kwargs")})
    for first in {path[0] for path in paths if path}:
        part = _view(module.get_submodule(first), [path[1:] for path in paths if path and path[0] == first])
        if part is None:
            return None
        view._modules[first] = part
    return view
