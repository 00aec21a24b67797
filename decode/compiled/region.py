"""Compiled regions: each is a compiled decoding step with its caches. A model keeps some of its regions for reuse.

Shapes: B rows of the batch, N nodes of a draft, D its depth, H hidden size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from decode.cache import TreeCache
from decode.compiled.graphs import GraphedStep
from decode.compiled.prompts import PromptGraphs
from decode.compiled.sampling import Sampler
from decode.draft import Drafter, KeepsProducts
from decode.drafters.layouts import Layout
from decode.ops.attention import grouped
from decode.ops.fast_linear import fast_linear
from decode.session import Session
from decode.step import State, decode_step
from medusa.backbone import Backbone, Readout, by_value
from medusa.memory import plain_tensors, total_memory

KEPT = 32
"""Maximum number of compiled regions that a model keeps; the least recently used region is dropped first."""
SHARE = 1 / 8
"""Part of the device's memory that the caches of kept regions may fill; the least recently used are freed first."""
COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_is_full_backward_hook"}
"""What each module has and the key need not hold as it is. Two are left, so that `_settings` gives tuples."""
PLAIN = (bool, int, float, str, type(None))
ARE_PLAIN = frozenset(PLAIN).issuperset
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial)
Key = tuple[object, ...]
"""Everything that a region was compiled for; a session reuses a compiled region with an equal key."""


class Region:
    """A step (`decode.step`) compiled for a batch size, a tree and a kind of sampling, with the state of its rows."""

    def __init__(
        self, state: State, drafter: Drafter, sampler: Sampler, tree: Layout, graphs: str, heads: nn.Module | None
    ) -> None:
        """Compile steps on `state`, whose prompts are read, with drafts that fill `tree`; `sampler` decides on them.

        `graphs` is one of `CUDA_GRAPHS`. `heads` are those of the drafter, if it has any."""
        self.state, self.drafter, self.sampler = state, drafter, sampler
        self.backbone = state.reader.backbone
        heads_caches = [] if state.heads_cache is None else state.heads_cache.caches
        self.caches = [*state.reader.caches, *heads_caches]
        self.nodes, self.longest = tree.num_nodes, tree.max_depth + 1  # caches of heads read no more of a path
        device = self.backbone.device
        state.root, state.hidden, state.alive = map(static, (state.root, state.hidden, state.alive))
        for buffer in sampler.buffers:
            static(buffer)
        if state.heads_cache is not None:
            state.heads_cache.chain(self.longest)  # torch.compile cannot trace its first call
        drafter.propose(state.frontier())  # fills tables that a tree keeps, for the same reason
        self.heads = heads
        self.addresses = self._addresses()
        # Torch 2.13 may write a result into part of a finished `cat`, and still reuse that memory. A recurrent head
        # then read the next token's embedding instead of its state.
        settings = {"inplace_buffers": False, "triton.cudagraphs": graphs == "torch"}
        self.compiled = compiled(self._step, settings)
        self.graphed = GraphedStep(lambda window: self._as_compiled(), device) if graphs == "own" else None
        self.prompts = PromptGraphs(state.reader, state.heads_cache) if graphs == "own" else None

    def __call__(self) -> Tensor:
        """Run one decoding step; returns `Decided.packed`."""
        return self._as_compiled() if self.graphed is None else self.graphed(self.caches[0].width)

    def _as_compiled(self) -> Tensor:
        # torch.compile cannot enter the contexts of this thread, so they are open before.
        reader = self.state.reader
        linear = fast_linear(self.backbone.head_weight, 2 * len(self.state.root))
        with grouped(self.backbone.config), linear, reader.backbone.watched():
            return self.compiled()

    def _step(self) -> Tensor:
        return decode_step(self.state, self.drafter, self.sampler, nothing).packed

    def begin(self, session: Session, root: Tensor, hidden: Tensor) -> None:
        """Decode the texts of another session, whose prompts the caches hold; for `root` and `hidden` see `State`."""
        self.sampler.begin(session.target, session.sequences)
        state = self.state
        for cache in self.caches:
            cache.for_steps(compiled=True)
        state.rows = list(range(len(root)))
        state.alive.fill_(1)
        state.begin(root, hidden)
        if isinstance(self.drafter, KeepsProducts):
            self.drafter.refresh()

    def end(self, unread: int = 0) -> int:
        """The slots that the next step needs, if the host has not read the results of `unread` steps."""
        return self.nodes + unread * self.longest + max(self.caches[0].lengths[row] for row in self.state.rows)

    def open(self, unread: int = 0) -> None:
        """Make room for the next step, and let it see all texts; for `unread` see `end`."""
        rows, end = self.state.rows, self.end(unread)
        for cache in self.caches:  # all have the same window, as a graph is recorded for one
            self._open(cache, end - max(cache.lengths[row] for row in rows), rows)

    def _open(self, cache: TreeCache, count: int, rows: Sequence[int] | None = None) -> None:
        cache.open(count, rows)
        if keep_in_place(cache):
            self.forget_graphs()

    def attach(self, backbone: Backbone, capacity: int) -> None:
        """Empty the caches for the prompts of another session, whose `backbone` is that of the region's model."""
        vars(self.backbone).update(vars(backbone))
        for cache in self.caches:
            cache.restart(capacity)
        # `model.to` and some adapters move weights to other memory without a change of the key.
        if (now := self._addresses()) != self.addresses:
            self.forget_graphs()
            self.addresses = now

    def read(self, ids: Tensor, lengths: Sequence[int]) -> Readout | None:
        """Read prompts `ids` [B, T] by a CUDA graph; `None` if none can hold them (`PromptGraphs`)."""
        if self.prompts is None or (bucket := self.prompts.bucket(lengths)) is None:
            return None
        for cache in self.caches:
            self._open(cache, bucket)
        return self.prompts(bucket, ids, lengths)

    def detach(self) -> None:
        """Keep nothing of the texts that were decoded, and no reference to the model, which may end before the code."""
        for cache in self.caches:
            cache.for_steps(compiled=False)
        vars(self.backbone).clear()

    def release(self) -> None:
        """Free the memory of the KV caches. The compiled code stays."""
        self.forget_graphs()
        for cache in self.caches:
            cache.release()

    def _addresses(self) -> list[int]:
        """The addresses of all parameters and buffers; of quantised ones, those of the tensors they consist of."""
        modules = [self.backbone.model, *([] if self.heads is None else [self.heads])]
        parts = [part for module in modules for part in modules_of(module)]
        states = [state for part in parts for state in (*part._parameters.values(), *part._buffers.values())]
        return [plain.data_ptr() for state in states if state is not None for plain in plain_tensors(state)]

    def forget_graphs(self) -> None:
        for graphs in (self.graphed, self.prompts):
            if graphs is not None:
                graphs.clear()

    @property
    def num_bytes(self) -> int:
        """The memory of all KV caches in bytes."""
        return sum(cache.num_bytes for cache in self.caches)


def nothing(stage: str) -> None:
    """The laps of a compiled step, which has no stages."""


def keep_in_place(cache: TreeCache) -> bool:
    """Let torch.compile know that a cache's tensors stay at their addresses, and that its numbers of slots change.

    Returns whether a buffer was new."""
    static(cache.filled)
    torch._dynamo.mark_dynamic(static(cache.window), 0)
    new = [buffer for buffer in cache.buffers if not hasattr(buffer, "_dynamo_static_input_type")]
    for buffer in new:
        torch._dynamo.mark_dynamic(static(buffer), 3)
    return bool(new)


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor as one whose address never changes, so that CUDA graphs can update it in place; returns it."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def compiled(step: Callable[[], Tensor], settings: dict[str, Any]) -> Callable[[], Tensor]:
    """Compile the bound method `step` as one graph, which no other object of its class shares.

    `settings` are those of inductor, PyTorch's compiler. Only torch.compile's guards on tensors and on the sizes of
    caches and windows are kept, because guards on a thousand modules take longer than a step of a small model. Instead,
    each session checks once, by `modules_key`, that no module has changed."""
    method = cast(MethodType, step)
    function = cast(FunctionType, method.__func__)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)  # shares no compiled code
    guards: dict[str, Any] = {
        "guard_filter_fn": lambda found: [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in found]
    }
    return torch.compile(MethodType(own, method.__self__), fullgraph=True, dynamic=False, options=guards | settings)


class Regions(list[tuple[Key, Region]]):
    """The compiled regions of a model that are kept for reuse, the last used one last. `max_bytes` may be changed."""

    def __init__(self, max_bytes: int) -> None:
        """Make an empty list; the caches of all regions in it take up to `max_bytes`."""
        super().__init__()
        self.max_bytes, self.lock = max_bytes, Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        """The compiled regions kept for `model`, as long as it lives; at first an empty list."""
        with _LOCK:
            if model not in _KEPT:
                _KEPT[model] = cls(int(SHARE * total_memory(model.device)))
            return _KEPT[model]

    def take(self, key: Key) -> Region | None:
        """Remove a stored compiled region with this key and return it; `None` if no region has the key."""
        with self.lock:
            for place, (held, region) in enumerate(self):
                if held == key:
                    del self[place]
                    return region
        return None

    def put_back(self, key: Key, region: Region) -> None:
        """Store a compiled region after use.

        Of more than `KEPT` regions, the oldest ones are dropped. If the caches of all regions take more than
        `max_bytes`, those of the oldest regions are freed; their compiled code stays, and gets new caches for its next
        text."""
        with self.lock:
            self.append((key, region))
            del self[:-KEPT]
            left = self.max_bytes
            for _, held in reversed(self):
                if held.num_bytes > left:
                    held.release()
                left -= held.num_bytes


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


_KEPT: WeakKeyDictionary[PreTrainedModel, Regions] = WeakKeyDictionary()  # nothing is stored on a user's model
_LOCK = Lock()
