"""A KV cache of fixed shape at fixed addresses, for compiled steps.

Shapes: B rows, S slots (the capacity), N nodes, C columns of a path, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.cache import TreeCache


class FixedLayer(CacheLayerMixin):
    """One layer's keys and values [B, heads, S, size], in the form that transformers' attention calls."""

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
        """Write the states [B, heads, N, size] of a step's nodes after the text; returns all slots."""
        _write(self.keys, self.owner.slots, key_states)
        _write(self.values, self.owner.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # unused: positions and masks are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.capacity, 0

    def get_max_cache_shape(self) -> int:
        return self.owner.capacity

    def get_max_length(self) -> int:
        return self.owner.capacity


class FixedCache(Cache):
    """A KV cache whose shape never changes; `lengths` [B], on the device, says how many slots hold text."""

    fixed_layers: list[FixedLayer]

    def __init__(self, like: TreeCache | FixedCache, capacity: int) -> None:
        """An empty cache with the layers of `like`, a cache that was filled."""
        self.capacity = capacity
        layers = []
        for layer in like.tree_layers if isinstance(like, TreeCache) else like.fixed_layers:
            buffers = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (layer.keys, layer.values)]
            layers.append(FixedLayer(self, *(static(buffer) for buffer in buffers)))
        self.rows = len(layers[0].keys)
        self.lengths = static(torch.zeros(self.rows, dtype=torch.long, device=layers[0].keys.device))
        self.slots = self.lengths[:, None]
        self.fixed_layers = layers
        super().__init__(layers=list(layers))

    def load(self, cache: TreeCache) -> None:
        """Copy the committed text of `cache`."""
        count = cache.longest
        for layer, source in zip(self.fixed_layers, cache.tree_layers, strict=True):
            _fill(layer.keys, source.keys[:, :, :count])
            _fill(layer.values, source.values[:, :, :count])
        self.lengths.copy_(torch.tensor(cache.lengths))

    def take(self, other: FixedCache) -> None:
        """Copy everything from a smaller cache."""
        for layer, source in zip(self.fixed_layers, other.fixed_layers, strict=True):
            _fill(layer.keys, source.keys)
            _fill(layer.values, source.values)
        self.lengths.copy_(other.lengths)

    def append_next(self, count: int) -> Tensor:
        """Let the next `count` states go after the text; returns their positions in a chain [B, count]."""
        positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        self.slots = positions.clamp_max(self.capacity - 1)
        return positions

    def move(self, path: Tensor) -> None:
        """Move the nodes path [B, C] of the last forward, in order, to the text's end (see `TreeCache.commit`)."""
        target = torch.arange(path.shape[1], device=path.device) + self.lengths[:, None]
        source = (self.lengths[:, None] + path).clamp_max(self.capacity - 1)
        for layer in self.fixed_layers:
            for buffer in (layer.keys, layer.values):
                index = source[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
                _write(buffer, target.clamp_max(self.capacity - 1), buffer.gather(2, index))


def _write(buffer: Tensor, slots: Tensor, states: Tensor) -> None:
    """Write states [B, heads, N, size] into the slots [B, N] of buffer [B, heads, S, size]."""
    if len(slots) == 1:
        buffer.index_copy_(2, slots[0], states)
    else:
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        buffer.transpose(1, 2).index_put_((rows, slots), states.transpose(1, 2))


def _fill(buffer: Tensor, states: Tensor) -> None:
    """Copy states [B, heads, T, size] into the first slots of buffer [B, heads, S, size], and zeros into the others.

    An earlier text must not remain there: a masked NaN would still reach the output, as 0 x NaN."""
    count = states.shape[2]
    buffer[:, :, :count] = states
    buffer[:, :, count:] = 0


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor that CUDA graphs may write to, because its address never changes."""
    torch._dynamo.mark_static_address(tensor)
    return tensor
