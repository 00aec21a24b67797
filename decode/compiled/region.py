"""Compiled regions: each is a compiled decoding step with its caches. A model keeps some of its regions for reuse.

Shapes: B rows of the batch, N nodes of a draft, D its depth, H hidden size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.compiled.fixed_cache import AnyCache, AnyHeadsCache, FixedCache, FixedHeadsCache, static
from decode.compiled.sampler import FixedSampler
from decode.draft import Drafter, Frontier
from decode.loop import at_end, pack
from decode.masks import visible_slots
from decode.ops.grouped_attention import grouped
from medusa.backbone import Backbone
from medusa.tree_support import LayerKinds, additive

KEPT = 8
"""Maximum number of compiled regions that a model keeps; the least recently used region is dropped first."""
COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType, partial)
Key = tuple[object, ...]
"""Everything that a region was compiled for; a session reuses a compiled region with an equal key."""


class Region:
    """A compiled step for one batch size, capacity, tree and sampler, with the caches and state of its rows."""

    def __init__(
        self,
        backbone: Backbone,
        cache: FixedCache,
        heads_cache: FixedHeadsCache | None,
        drafter: Drafter,
        sampler: FixedSampler,
        hidden: Tensor,
    ) -> None:
        """Make a compiled region; `hidden` [B, H] shows the shape and dtype of the drafter's hidden states."""
        self.backbone, self.cache, self.heads_cache = backbone, cache, heads_cache
        self.drafter, self.sampler = drafter, sampler
        self.config, self.layers = backbone.config, LayerKinds(backbone.config)
        device, rows = backbone.device, cache.rows
        self.root = static(torch.zeros(rows, dtype=torch.long, device=device))
        self.hidden = static(torch.zeros_like(hidden))
        self.alive = static(torch.ones(rows, dtype=torch.long, device=device))  # 0 for rows that have ended
        self.end = min(end for end in (backbone.context, cache.capacity) if end is not None)
        drafter.propose(self.frontier())  # fills the tables that a tree caches, which compiled steps cannot do
        self.compiled = compiled(self._step, device)

    def __call__(self, u: Tensor) -> list[list[int]]:
        """Run one decoding step. `u` [B, D + 1]: a uniform random number for each token that the step can write.

        Returns the decisions of the step as lists of numbers, which `decode.loop.unpack` reads."""
        with grouped(self.config), self.backbone.watched():
            packed: Tensor = self.compiled(u)
        return packed.tolist()

    def frontier(self) -> Frontier:
        """The last decided tokens (roots) and the hidden states before them, from which the next step drafts."""
        context_kv = None if self.heads_cache is None else self.heads_cache.context_kv()
        return Frontier(self.root, self.hidden, list(range(self.cache.rows)), context_kv)

    def _step(self, u: Tensor) -> Tensor:
        cache, lengths = self.cache, self.cache.lengths
        draft = self.drafter.propose(self.frontier())
        topology = draft.topology
        positions = (lengths[:, None] + topology.depth).clamp_max(self.end - 1)
        cache.append_next(topology.num_nodes)
        masks = self.layers.masks(
            lambda kind: additive(visible_slots(topology, lengths, cache.capacity, kind), self.backbone.dtype)[:, None]
        )
        readout = self.backbone.forward(draft.ids, cache, position_ids=positions, attention_mask=masks)
        accepted = self.sampler.accept(draft, readout.logits, u, self.end - 1 - lengths)
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
        return packed

    def load(self, cache: AnyCache, heads_cache: AnyHeadsCache | None, frontier: Frontier, alive: list[bool]) -> None:
        """Copy both caches' keys and values and the `frontier` into the region; `alive` marks unfinished rows."""
        self.cache.load(cache)
        if self.heads_cache is not None and heads_cache is not None:
            self.heads_cache.load(heads_cache)
        self.root.copy_(frontier.root)
        self.hidden.copy_(frontier.hidden)
        self.end_rows(alive)

    def end_rows(self, alive: list[bool]) -> None:
        """Freeze the rows that are not `alive`: they stay in the batch, but their texts no longer grow."""
        self.alive.copy_(torch.tensor(alive))


def compiled(step: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Compile the bound method `step` as one graph, which no other object of its class shares.

    Only torch.compile's guards on tensors are kept, because guards on a thousand modules take longer than a step of a
    small model. Instead, each session checks once, by `modules_key`, that no module has changed."""
    method = cast(MethodType, step)
    function = cast(FunctionType, method.__func__)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)  # shares no compiled code
    options: dict[str, object] = {
        "guard_filter_fn": partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=True),
        # Torch 2.13 may write a result into part of a finished `cat`, and still reuse that memory. A recurrent head
        # then read the next token's embedding instead of its state.
        "inplace_buffers": False,
        "triton.cudagraphs": device.type == "cuda",
    }
    bound = MethodType(own, method.__self__)
    return torch.compile(bound, fullgraph=True, dynamic=False, options=options)  # type: ignore[arg-type]


class Regions(list[tuple[Key, Region]]):
    """The compiled regions that a model keeps for reuse, the last used one last.

    A copy of the model starts without regions."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        """The compiled regions that are stored on `model`; the first call stores an empty list."""
        return vars(model).setdefault("_medusa_regions", cls())

    def __reduce__(self) -> tuple[type[Regions], tuple[()]]:
        return Regions, ()

    def take(self, key: Key) -> Region | None:
        """Remove a stored compiled region with this key and return it; `None` if no region has the key."""
        with self.lock:
            for place, (held, region) in enumerate(self):
                if held == key:
                    del self[place]
                    return region
        return None

    def put_back(self, key: Key, region: Region) -> None:
        """Store a compiled region after use; if there are more than `KEPT`, the oldest ones are dropped."""
        with self.lock:
            self.append((key, region))
            del self[:-KEPT]


def modules_key(module: nn.Module) -> Key:
    """A module's part of the key of a compiled region: the hooks, parameters and settings of its submodules.

    Settings are attributes such as train mode or active adapters. Parameters enter the key by identity (because tied
    parameters are one input of compiled code), dtype and device, but not by value."""
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
    """Convert a value for a region's key: numbers, strings, functions stay; containers become tuples; others `None`."""
    if isinstance(value, PLAIN):
        return value
    if type(value) is dict:
        value = list(value.items())
    elif type(value) is set:
        value = sorted(value, key=repr)
    if type(value) is list or type(value) is tuple:
        return tuple(part for part in map(_plain, value) if part not in (None, ()))
    return None
