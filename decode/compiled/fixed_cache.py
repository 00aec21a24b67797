"""KV caches of the backbone and of the heads for compiled steps, with fixed shapes and memory addresses.

Shapes: B rows of the batch, S cache slots (the capacity), N draft nodes, C columns of a path, H hidden size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.cache import TreeCache, TreeLayer
from decode.heads_cache import HeadsCache
from decode.masks import visible_slots
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree
from medusa.tree_support import additive


class FixedLayer(CacheLayerMixin):
    """Keys and values [B, heads, S, head size] of one layer, with the methods that transformers' attention calls."""

    is_sliding = False
    is_compileable = True
    keys: Tensor
    values: Tensor

    def __init__(self, owner: FixedCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.owner, self.keys, self.values, self.is_initialized = owner, keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a FixedCache is made from a cache that was filled")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, N, head size] of N nodes to the slots reserved last; returns all S slots."""
        _write(self.keys, self.owner.slots, key_states)
        _write(self.values, self.owner.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # unused: positions and masks are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.capacity, 0

    def get_max_cache_shape(self) -> int:
        return self.owner.capacity

    get_max_length = get_max_cache_shape


class FixedCache(Cache):
    """A KV cache whose shape never changes; the tensor `lengths` [B] counts the cache slots that hold text."""

    def __init__(self, like: AnyCache, capacity: int) -> None:
        """Make an empty cache of `capacity` slots per row, with layers shaped like those of the filled cache `like`."""
        self.capacity = capacity
        self.tree_layers: list[FixedLayer] = []
        for layer in like.tree_layers:
            keys, values = (x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (layer.keys, layer.values))
            self.tree_layers.append(FixedLayer(self, static(keys), static(values)))
        self.rows = len(keys)
        self.lengths = static(torch.zeros(self.rows, dtype=torch.long, device=keys.device))
        self.slots = self.lengths[:, None]
        super().__init__(layers=list(self.tree_layers))

    def load(self, other: AnyCache) -> None:
        """Copy the keys and values of the cache `other`; if `other` is a `TreeCache`, its memory is freed."""
        count = other.longest if isinstance(other, TreeCache) else other.capacity
        sources: Sequence[TreeLayer | FixedLayer] = other.tree_layers
        for layer, source in zip(self.tree_layers, sources, strict=True):
            for buffer, states in ((layer.keys, source.keys), (layer.values, source.values)):
                # No earlier text may remain after these slots: a masked NaN would still reach the output, as 0 x NaN.
                buffer[:, :, :count] = states[:, :, :count]
                buffer[:, :, count:] = 0
        self.lengths.copy_(torch.as_tensor(other.lengths))
        if isinstance(other, TreeCache):
            other.release()

    def append_next(self, count: int) -> Tensor:
        """Reserve the `count` cache slots after each text for the next forward; returns their positions [B, count]."""
        positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        self.slots = positions.clamp_max(self.capacity - 1)
        return positions

    def move(self, path: Tensor) -> None:
        """Move the keys and values of the accepted nodes `path` [B, C] to the slots right after each row's text."""
        self.append_next(path.shape[1])
        source = (self.lengths[:, None] + path).clamp_max(self.capacity - 1)
        for layer in self.tree_layers:
            for buffer in (layer.keys, layer.values):
                index = source[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                _write(buffer, self.slots, buffer.gather(2, index))


def _write(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write `states` [B, heads, N, head size] into cache slots `slots` [B, N] of `buffer` [B, heads, S, head size]."""
    if len(slots) == 1:
        buffer.index_copy_(2, slots[0], states)
    else:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        buffer.transpose(1, 2).index_put_((rows, slots), states.transpose(1, 2))


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor as one whose address never changes, so that CUDA graphs can update it in place; returns it."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


class FixedHeadsCache:
    """A `HeadsCache` of fixed shape: one or two KV caches for heads that look back at the text."""

    prefix: FixedCache | None  # of prefix layers, which are decoder layers between backbone and heads, if there are any
    pairs: FixedCache | None  # of pairs (hidden state, token after it), if the heads attend to the text

    def __init__(self, like: AnyHeadsCache, capacity: int, max_depth: int) -> None:
        """Make empty caches for the heads of the cache `like`; `max_depth` is the depth of the heads' draft tree."""
        self.heads: MedusaHeads = like.heads
        self.backbone: Backbone = like.backbone
        self.chain = Topology.of(Tree.chain(max_depth).to(like.backbone.device))
        caches = (like.prefix, like.pairs)
        self.prefix, self.pairs = (None if cache is None else FixedCache(cache, capacity) for cache in caches)

    def load(self, other: AnyHeadsCache) -> None:
        """Copy the keys and values that the cache `other` holds for the same heads."""
        for cache, source in zip((self.prefix, self.pairs), (other.prefix, other.pairs), strict=True):
            if cache is not None and source is not None:
                cache.load(source)

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, end: Tensor, counts: Tensor) -> Tensor:
        """Append B rows' accepted paths to the caches; returns the heads' input [B, H] at the paths' last nodes.

        `before`, `hidden` and `ids`: see `HeadsCache.path`. `end` [B] is the column of each path's last node, and
        `counts` [B] is the number of nodes that each row keeps, 0 for rows that have ended."""
        cache = self.prefix
        if cache is not None:
            assert self.heads.prefix is not None
            positions = cache.append_next(hidden.shape[1])
            allowed = visible_slots(self.chain, cache.lengths, cache.capacity)[:, None]
            hidden = self.heads.prefix(hidden, positions, additive(allowed, hidden.dtype), cache)
            cache.lengths.add_(counts)
        cache = self.pairs
        if cache is not None:
            positions = cache.append_next(hidden.shape[1])
            pairs = torch.cat([before[:, None], hidden[:, :-1]], dim=1)
            cache.update(*self.heads.project_kv(pairs, self.backbone.embed(ids).to(hidden), positions), 0)
            cache.lengths.add_(counts)
        return hidden.gather(1, end[:, None, None].expand(-1, -1, hidden.shape[-1]))[:, 0]

    def context_kv(self) -> ContextKV | None:
        """The keys and values of the text for the next draft; `None` if the heads do not attend to the text."""
        if self.pairs is None:
            return None
        layer, lengths = self.pairs.tree_layers[0], self.pairs.lengths[:, None]
        seen = torch.arange(self.pairs.capacity, device=lengths.device) < lengths
        return ContextKV(layer.keys, layer.values, seen[:, None], lengths, self.heads.config.num_heads)


AnyCache = TreeCache | FixedCache
AnyHeadsCache = HeadsCache | FixedHeadsCache
