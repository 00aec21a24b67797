"""One compiled step with its state on the device, and the compiled steps that a model keeps.

Shapes: B rows, N nodes, D the depth, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.accept import Acceptance
from decode.compiled.fixed_cache import AnyCache, AnyHeadsCache, FixedCache, FixedHeadsCache, static
from decode.compiled.sampler import FixedSampler
from decode.draft import Draft, Drafter, Frontier
from decode.loop import at_end, pack
from decode.masks import LayerKind, LayerKinds, additive, visible_slots
from decode.ops.grouped_attention import grouped
from decode.topology import Topology
from medusa.backbone import Backbone

KEPT = 8
"""Regions that a model keeps, each with its cache; the least recently used one is dropped first."""
COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training", "_forward_hooks", "_forward_pre_hooks"}
PLAIN = (bool, int, float, str, FunctionType, BuiltinFunctionType, MethodType, partial)
Key = tuple[object, ...]
"""What a region is compiled for."""


class Region:
    """The compiled step for one batch size, capacity, tree and sampler."""

    def __init__(
        self,
        backbone: Backbone,
        cache: FixedCache,
        heads_cache: FixedHeadsCache | None,
        drafter: Drafter,
        sampler: FixedSampler,
        hidden: Tensor,
    ) -> None:
        """`hidden` [B, H] gives the shape and dtype of the hidden states that the drafter starts from."""
        self.backbone, self.cache, self.heads_cache = backbone, cache, heads_cache
        self.drafter, self.sampler = drafter, sampler
        self.config, self.layers = backbone.config, LayerKinds(backbone.config)
        device, rows = backbone.device, cache.rows
        self.root = static(torch.zeros(rows, dtype=torch.long, device=device))
        self.hidden = static(torch.zeros_like(hidden))
        self.alive = static(torch.ones(rows, dtype=torch.long, device=device))  # 0 for rows that have ended
        self.end = min(end for end in (backbone.context, cache.capacity) if end is not None)
        _ = drafter.propose(self.frontier()).topology.non_ancestors  # a compiled step cannot fill this cache
        self.compiled = compiled(self._step, device)

    def __call__(self, u: Tensor) -> list[list[int]]:
        """Run a step with uniform numbers u [B, D + 1]; returns the argument of `decode.loop.unpack`."""
        with grouped(self.config), self.backbone.watched():
            packed: Tensor = self.compiled(u)
        return packed.tolist()

    def frontier(self) -> Frontier:
        """Where the next step starts."""
        context_kv = None if self.heads_cache is None else self.heads_cache.context_kv()
        return Frontier(self.root, self.hidden, list(range(self.cache.rows)), context_kv)

    def _step(self, u: Tensor) -> Tensor:
        cache, lengths = self.cache, self.cache.lengths
        draft = self.drafter.propose(self.frontier())
        topology = draft.topology
        positions = (lengths[:, None] + topology.depth).clamp_max(self.end - 1)
        cache.append_next(topology.num_nodes)
        masks = self.layers.masks(lambda kind: self._mask(kind, topology, lengths))
        readout = self.backbone.forward(draft.ids, cache, position_ids=positions, attention_mask=masks)
        accepted = self.sampler.accept(draft, readout.logits, u, self.end - 1 - lengths)
        if topology.max_children > 1:
            cache.move(accepted.path.clamp_min(0))
        packed, counts = pack(draft, accepted), accepted.length * self.alive  # rows that have ended do not grow
        self.hidden.copy_(self._heads_read(draft, readout.hidden, accepted, counts))
        self.root.copy_(accepted.next_root)
        lengths.add_(counts)
        return packed

    def _heads_read(self, draft: Draft, hidden: Tensor, accepted: Acceptance, counts: Tensor) -> Tensor:
        """The hidden states [B, H] from which the heads start the next step, of a step's hidden [B, N, H]."""
        if self.heads_cache is None:
            return at_end(hidden, accepted)
        path = accepted.path.clamp_min(0)
        states = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[-1])).to(self.hidden.dtype)
        return self.heads_cache.path(self.hidden, states, draft.ids.gather(1, path), accepted.length - 1, counts)

    def _mask(self, kind: LayerKind, topology: Topology, lengths: Tensor) -> Tensor:
        return additive(visible_slots(topology, lengths, self.cache.capacity, kind), self.backbone.dtype)[:, None]

    def load(self, cache: AnyCache, heads_cache: AnyHeadsCache | None, frontier: Frontier, alive: list[bool]) -> None:
        """Continue the texts that these caches hold, from `frontier`."""
        self.cache.load(cache)
        if self.heads_cache is not None and heads_cache is not None:
            self.heads_cache.load(heads_cache)
        self.root.copy_(frontier.root)
        self.hidden.copy_(frontier.hidden)
        self.end_rows(alive)

    def end_rows(self, alive: list[bool]) -> None:
        """End the rows that are not `alive`; they stay in the batch, whose shape is fixed, and do nothing."""
        self.alive.copy_(torch.tensor(alive))


def compiled(step: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Compile a bound method in one graph, for its object alone.

    Only the guards on tensors are kept; the region's key holds all else. Checking a thousand modules takes longer than
    a small model's step, so they are checked once per session (`modules_key`).
    """
    method = cast(MethodType, step)
    function = cast(FunctionType, method.__func__)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)  # shares no compiled code
    options: dict[str, object] = {
        "guard_filter_fn": partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=True),
        # Torch 2.13 may write a result into part of a finished `cat`, and still reuse that memory. A recurrent head
        # then read the next token's embedding instead of its state.
        "inplace_buffers": False,
    }
    if device.type == "cuda":
        options["triton.cudagraphs"] = True
    bound = MethodType(own, method.__self__)
    return torch.compile(bound, fullgraph=True, dynamic=False, options=options)  # type: ignore[arg-type]


class Regions(list[tuple[Key, Region]]):
    """A model's regions that are not in use, the latest last; a copy of the model starts with none (`__reduce__`)."""

    ATTRIBUTE = "_medusa_regions"

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        """The regions of this model."""
        return vars(model).setdefault(cls.ATTRIBUTE, cls())

    def __reduce__(self) -> tuple[type[Regions], tuple[()]]:
        return Regions, ()

    def take(self, key: Key, make: Callable[[], Region]) -> Region:
        """Remove and return a region with this key, or make one."""
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


def surroundings_key(backbone: Backbone) -> Key:
    """What compiled code depends on outside the modules: attention, autocast, threads."""
    kind = backbone.device.type
    precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return backbone.config._attn_implementation, precision, torch.get_num_threads()


def modules_key(module: nn.Module) -> Key:
    """The key of a module: hooks, parameters and settings of all submodules, such as train mode or active adapters.

    Tied parameters are one input of a region. The values of parameters may change."""
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
    if type(value) is dict:
        value = list(value.items())
    elif type(value) is set:
        value = sorted(value, key=repr)
    if type(value) is list or type(value) is tuple:
        return tuple(part for part in map(_plain, value) if part not in (None, ()))
    return None
