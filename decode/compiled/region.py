"""Compiled regions: each is a compiled decoding step with its caches. A model keeps some of its regions for reuse.

Shapes: B rows of the batch, N nodes of a draft, D its depth, H hidden size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from decode.accept import at_end, pack
from decode.cache import TreeCache
from decode.compiled.direct import DirectStep, RecordingBackend
from decode.compiled.fixed_cache import FixedCache, FixedHeadsCache, static, window_of
from decode.compiled.graphs import GraphedStep
from decode.compiled.sampler import FixedSampler
from decode.draft import Drafter, Frontier, KeepsProducts
from decode.heads_cache import HeadsCache
from decode.masks import visible_slots
from decode.ops.fast_linear import fast_linear
from decode.ops.grouped_attention import grouped
from medusa.backbone import Backbone, by_value
from medusa.memory import bytes_of, plain_tensors, total_memory
from medusa.tree_support import LayerKinds, additive

KEPT = 32
"""Maximum number of compiled regions that a model keeps; the least recently used region is dropped first."""
SHARE = 1 / 8
"""Part of the device's memory that the caches of kept regions may fill; the least recently used are freed first."""
SMALL = 1 << 26
"""For backbones up to this size in bytes, the code that calls the kernels on a CPU is C++ instead of Python.

A step of stories260K then takes a fifth to a quarter less time, and compiling takes 23 instead of 28 s. With 24 layers
and 300 MB, compiling takes 93 instead of 66 s, and a step hardly less time."""
STORED = "_medusa_regions"
"""The attribute of a model that holds its regions. They refer to the model, so that they must live and end with it."""
COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType, partial)
Key = tuple[object, ...]
"""Everything that a region was compiled for; a session reuses a compiled region with an equal key."""


class Region:
    """A compiled step for one batch size, tree and sampler, with the caches and state of its rows."""

    def __init__(
        self,
        backbone: Backbone,
        cache: FixedCache,
        heads_cache: FixedHeadsCache | None,
        drafter: Drafter,
        sampler: FixedSampler,
        frontier: Frontier,
        max_depth: int,
        graphs: str,
        heads: nn.Module | None = None,
    ) -> None:
        """Make a compiled region for drafts of `max_depth` D, without cache slots (see `make_room`).

        `frontier` shows the shape and dtype of the state between steps; `graphs` is one of `CUDA_GRAPHS`. `heads` are
        those of the drafter, if it has any."""
        self.backbone, self.cache, self.heads_cache = backbone, cache, heads_cache
        self.drafter, self.sampler = drafter, sampler
        self.drafted = False  # whether an eager draft has been made
        self.config, self.layers = backbone.config, LayerKinds(backbone.config)
        self.caches = [cache, *([] if heads_cache is None else heads_cache.caches)]
        self.root, self.hidden = static(torch.zeros_like(frontier.root)), static(torch.zeros_like(frontier.hidden))
        self.alive = static(torch.ones_like(frontier.root))  # 0 for rows that have ended
        self.end = 1 << 62 if backbone.context is None else backbone.context
        self.u = static(torch.zeros(cache.rows, max_depth + 1, dtype=torch.float64, device=backbone.device))
        """Input [B, D + 1] of a step: a uniform random number for each token that the step can write."""
        # Torch 2.13 may write a result into part of a finished `cat`, and still reuse that memory. A recurrent head
        # then read the next token's embedding instead of its state.
        settings: dict[str, Any] = {"inplace_buffers": False, "triton.cudagraphs": graphs == "torch"}
        on_cpu = backbone.device.type == "cpu"
        if on_cpu and bytes_of(backbone.model) <= SMALL:
            settings["cpp_wrapper"] = True
        self.runner: GraphedStep | DirectStep | None = None
        backend = None
        if graphs == "own":
            self.runner = GraphedStep(self._as_compiled, backbone.device)
        elif on_cpu:
            backend = RecordingBackend(settings)
            self.runner = DirectStep(self._as_compiled, backend)
        self.compiled = compiled(self._step, settings, backend)
        self.modules = [backbone.model, *([] if heads is None else [heads])]
        self.addresses: list[int] = []  # of the tensors of these modules, which our own graphs hold

    def __call__(self) -> list[list[int]]:
        """Run one decoding step; returns its decisions as lists of numbers, which `decode.loop.unpack` reads."""
        packed = self._as_compiled() if self.runner is None else self.runner(self.cache.width)
        return packed.tolist()

    def _as_compiled(self) -> Tensor:
        """Run one decoding step by torch.compile."""
        with grouped(self.config), fast_linear(self.backbone.head_weight, 2 * self.cache.rows), self.backbone.watched():
            return self.compiled()

    @property
    def capacity(self) -> int:
        """The number of cache slots that a text and a draft after it may take."""
        return self.cache.capacity

    @property
    def num_bytes(self) -> int:
        """The memory of all KV caches in bytes."""
        return sum(cache.num_bytes for cache in self.caches)

    def make_room(self, slots: int, keep: bool = True) -> None:
        """Replace the KV caches by larger ones of `slots` cache slots per row; `keep`: with the text in them."""
        self._clear_runner()
        for cache in self.caches:
            cache.make_room(slots, keep)

    def look_at(self, slots: int) -> None:
        """Make attention read the first `slots` cache slots, which must hold the longest text and a draft after it."""
        if slots != self.cache.width:
            window = window_of(slots, self.root.device)
            for cache in self.caches:
                cache.window = window

    def release(self) -> None:
        """Free the memory of the KV caches. The compiled code stays."""
        self._clear_runner()
        for cache in self.caches:
            cache.release()

    def _clear_runner(self) -> None:
        if self.runner is not None:
            self.runner.clear()

    def _step(self) -> Tensor:
        cache, lengths = self.cache, self.cache.lengths
        draft = self.drafter.propose(self.frontier())
        topology = draft.topology
        positions = (lengths[:, None] + topology.depth).clamp_max(self.end - 1)
        cache.append_next(topology.num_nodes)
        masks = self.layers.masks(
            lambda kind: additive(visible_slots(topology, lengths, cache.width, kind), self.backbone.dtype)[:, None]
        )
        readout = self.backbone.forward(draft.ids, cache, position_ids=positions, attention_mask=masks)
        accepted = self.sampler.accept(draft, readout.logits, self.u, self.end - 1 - lengths)
        if topology.max_children > 1:
            cache.move(accepted.path.clamp_min(0))
        packed, counts = pack(draft, accepted), accepted.length * self.alive  # rows that have ended do not grow
        if self.heads_cache is None:
            hidden = at_end(readout.hidden, accepted)
        else:
            path = accepted.path.clamp_min(0)
            on_path = path[:, :, None].expand(-1, -1, readout.hidden.shape[-1])
            states, ids = readout.hidden.gather(1, on_path).to(self.hidden.dtype), draft.ids.gather(1, path)
            hidden = self.heads_cache.path(self.hidden, states, ids, accepted.length - 1, counts)
        self.hidden.copy_(hidden)
        self.root.copy_(accepted.next_root)
        lengths.add_(counts)
        for each in self.caches:
            each.end_step()
        return packed

    def frontier(self) -> Frontier:
        """The last decided tokens (roots) and the hidden states before them, from which the next step drafts."""
        context_kv = None if self.heads_cache is None else self.heads_cache.context_kv()
        return Frontier(self.root, self.hidden, list(range(self.cache.rows)), context_kv)

    def load(self, cache: TreeCache, heads_cache: HeadsCache | None, frontier: Frontier, alive: list[bool]) -> None:
        """Copy both caches' keys and values and the `frontier` into the region; `alive` marks unfinished rows."""
        self.cache.load(cache)
        if self.heads_cache is not None and heads_cache is not None:
            self.heads_cache.load(heads_cache)
        self.root.copy_(frontier.root)
        self.hidden.copy_(frontier.hidden)
        self.end_rows(alive)
        # `model.to` and some adapters move weights to other memory without a change of the key.
        if isinstance(self.runner, GraphedStep) and self.addresses != (now := addresses(self.modules)):
            self._clear_runner()
            self.addresses = now
        if not self.drafted:
            self.drafter.propose(self.frontier())  # fills the tables that a tree caches, which compiled steps cannot do
            self.drafted = True
        elif isinstance(self.drafter, KeepsProducts):
            self.drafter.refresh()

    def end_text(self) -> None:
        """Hold no inputs of direct calls between texts, when weights may be replaced."""
        if isinstance(self.runner, DirectStep):
            self.runner.clear()

    def end_rows(self, alive: list[bool]) -> None:
        """Freeze the rows that are not `alive`: they stay in the batch, but their texts no longer grow."""
        self.alive.copy_(torch.tensor(alive))


def compiled(
    step: Callable[[], Tensor], settings: dict[str, Any], backend: RecordingBackend | None
) -> Callable[[], Tensor]:
    """Compile the bound method `step` as one graph, which no other object of its class shares.

    `backend` makes machine code of the graph; `None`: inductor, PyTorch's compiler, with these `settings`.

    Only torch.compile's guards on tensors and on the sizes of caches and windows are kept, because guards on a thousand
    modules take longer than a step of a small model. Instead, each session checks once, by `modules_key`, that no
    module has changed."""
    method = cast(MethodType, step)
    function = cast(FunctionType, method.__func__)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)  # shares no compiled code
    guards: dict[str, Any] = {
        "guard_filter_fn": lambda found: [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in found]
    }
    bound = MethodType(own, method.__self__)
    how: dict[str, Any] = {"options": guards | settings} if backend is None else {"options": guards, "backend": backend}
    return torch.compile(bound, fullgraph=True, dynamic=False, **how)


class Regions(list[tuple[Key, Region]]):
    """The compiled regions that a model keeps for reuse, the last used one last. `max_bytes` may be changed.

    A copy of the model holds `None` instead, which needs no package when it is unpickled."""

    def __init__(self, max_bytes: int) -> None:
        """Make an empty list; the caches of all regions in it take up to `max_bytes`."""
        super().__init__()
        self.max_bytes, self.lock = max_bytes, Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        """The compiled regions that are stored on `model`; the first call stores an empty list."""
        if not isinstance(vars(model).get(STORED), Regions):
            vars(model)[STORED] = cls(int(SHARE * total_memory(model.device)))
        return vars(model)[STORED]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

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


def addresses(modules: list[nn.Module]) -> list[int]:
    """The memory addresses of all parameters and buffers; of quantised ones, those of the tensors they consist of."""
    states = (state for module in modules for state in (*module.parameters(), *module.buffers()))
    return [plain.data_ptr() for state in states for plain in plain_tensors(state)]


def modules_key(module: nn.Module) -> Key:
    """A module's part of the key of a compiled region: the hooks, parameters, settings and configs of its submodules.

    Settings are attributes such as train mode or active adapters. Parameters enter the key by identity (because tied
    parameters are one input of compiled code), dtype and device, but not by value. Configs enter it by value, and each
    of them once, although most submodules hold it."""
    configs: dict[int, object] = {}
    parts = tuple(
        (
            type(part),
            type(part).forward,
            *((id(p), p.dtype, p.device) for p in part._parameters.values() if p is not None),
            *part._forward_pre_hooks.values(),
            *part._forward_hooks.values(),
            *(
                (name, _plain(value, configs))
                for name, value in list(vars(part).items())
                if name not in COMMON_ATTRIBUTES
            ),
        )
        for part in module.modules()
    )
    return parts, tuple(configs.values())


def _plain(value: object, configs: dict[int, object]) -> object:
    """Convert a value for a region's key: numbers, strings, functions stay; containers become tuples; others `None`.

    A config is added to `configs`, and is converted to its number among them."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, PretrainedConfig):
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
