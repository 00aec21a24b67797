"""KV caches of the backbone and of the heads for compiled steps, with fixed shapes and memory addresses.

Shapes: B rows of the batch, S cache slots (the capacity), W of them that attention reads (the window), N draft nodes,
C columns of a path, H hidden size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.cache import TreeCache
from decode.heads_cache import HeadsCache
from decode.masks import visible_slots
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import AttendsToText, ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree
from medusa.tree_support import additive

BLOCK = 256
"""Cache slots per block. Windows are whole blocks, so that compiled code knows that rows of masks, and of their parts
(`decode.ops.split_attention`), are aligned."""
STEP = 256
"""Number of cache slots by which capacities and windows of up to 2048 slots grow; larger ones grow by up to 1/8."""

WIDEST = 2048
"""The widest window of heads for which a compiled step copies the keys in the window, also after shorter texts."""


class FixedLayer(CacheLayerMixin):
    """One layer of a `FixedCache`, with the methods that transformers' attention calls."""

    is_sliding = False
    is_compileable = True

    def __init__(self, owner: FixedCache, places: tuple[Place, ...]) -> None:
        """Make a layer whose keys and values have these `places`; a layer that reads those of another has none."""
        super().__init__()
        self.owner, self.places, self.is_initialized = owner, places, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("a FixedCache is made from a cache that was filled")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, N, head size] of N nodes to the slots reserved last.

        Returns the keys and values of all slots of the window."""
        for place, states in zip(self.places, (key_states, value_states), strict=True):
            self.owner.write(place, states)
        return self.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and values [B, heads, W, head size] of the W slots of the window."""
        keys, values = (self.owner.read(place) for place in self.places)
        return keys, values

    def get_seq_length(self) -> int:
        return 0  # unused: positions and masks are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.width, 0

    def get_max_cache_shape(self) -> int:
        return self.owner.width

    get_max_length = get_max_cache_shape


class FixedCache(Cache):
    """A KV cache whose steps all have one shape; the tensor `lengths` [B] counts the cache slots that hold text.

    Attention reads only a window, the first W of the S slots. Both numbers are symbols of the compiled code, so that
    texts outgrow a window or the cache without another compile."""

    def __init__(self, like: TreeCache) -> None:
        """Make a cache without slots (see `make_room`), with layers shaped like those of the filled cache `like`."""
        shapes: dict[object, list[Tensor]] = {}
        self.tree_layers: list[FixedLayer] = []
        for layer in like.tree_layers:
            held = (layer.keys, layer.values) if layer.is_initialized else ()  # Gemma-3n: layers share keys
            self.tree_layers.append(FixedLayer(self, tuple(self._place(shapes, states) for states in held)))
        self.shapes = [(len(alike), alike[0][:, :, :0]) for alike in shapes.values()]
        first = like.tree_layers[0].keys
        self.rows, device = len(first), first.device
        self.buffers: list[Tensor] = []  # [parts, B, heads, S, head size] each; a part is one layer's keys or values
        self.window = torch.empty(0)  # an element for each block of the window; only the number of elements matters
        self.lengths = static(torch.zeros(self.rows, dtype=torch.long, device=device))
        self.slots: Tensor | None = None  # within a step: the slots [B, count] that were reserved last
        super().__init__(layers=list(self.tree_layers))

    @staticmethod
    def _place(shapes: dict[object, list[Tensor]], states: Tensor) -> Place:
        """Choose the buffer for a layer's keys or values, like `states`, and the part of this buffer."""
        key = states.shape[1], states.shape[3], states.dtype, states.device
        alike = shapes.setdefault(key, [])
        alike.append(states)
        return list(shapes).index(key), len(alike) - 1

    @property
    def capacity(self) -> int:
        """The width of the widest window."""
        return self.buffers[0].shape[3] - BLOCK if self.buffers else 0

    @property
    def width(self) -> int:
        """The number of cache slots that attention reads, W."""
        return len(self.window) * BLOCK

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def make_room(self, capacity: int, keep: bool = True) -> None:
        """Replace the buffers by larger ones for windows of `capacity` slots, with the text if `keep`.

        No window is as wide as the buffers: such a window lies in one piece, which needs other compiled code."""
        if not keep:
            self.buffers.clear()
        for index, (parts, like) in enumerate(self.shapes):
            # Zeros, because uninitialised memory may hold NaN, and a masked NaN still reaches the output as 0 x NaN.
            buffer = like.new_zeros(parts, *like.shape[:2], capacity + BLOCK, like.shape[3])
            if keep:
                old = self.buffers[index]
                buffer[:, :, :, : old.shape[3]] = old
                self.buffers[index] = buffer
            else:
                self.buffers.append(buffer)
            torch._dynamo.mark_dynamic(static(buffer), 3)

    def release(self) -> None:
        """Free the memory of all keys and values; `make_room` allocates new memory."""
        self.buffers.clear()

    def load(self, other: TreeCache) -> None:
        """Copy the keys and values of the cache `other`, whose memory is freed."""
        for layer, source in zip(self.tree_layers, other.tree_layers, strict=True):
            held = (source.keys, source.values) if layer.places else ()
            for (index, part), states in zip(layer.places, held, strict=True):
                self.buffers[index][part, :, :, : other.longest] = states[:, :, : other.longest]
        for buffer in self.buffers:
            # No earlier text may remain after these slots: a masked NaN would still reach the output, as 0 x NaN.
            buffer[:, :, :, other.longest :] = 0
        self.lengths.copy_(torch.as_tensor(other.lengths))
        other.release()

    def append_next(self, count: int) -> Tensor:
        """Reserve the `count` cache slots after each text for the next forward; returns their positions [B, count]."""
        positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
        self.slots = positions.clamp_max(self.width - 1)  # rows that have ended may be longer than the window
        return positions

    def end_step(self) -> None:
        """Forget the reserved slots. A tensor that a step leaves in an attribute is one more result of its code."""
        self.slots = None

    def read(self, place: Place) -> Tensor:
        """The keys or values [B, heads, W, head size] of one layer in the window."""
        buffer, part = place
        return self.buffers[buffer][part, :, :, : self.width]

    def write(self, place: Place, states: Tensor) -> None:
        """Write keys or values [B, heads, N, head size] of one layer to the slots reserved last."""
        buffer, part = place
        parts = torch.full((1, 1, 1), part, device=states.device)
        # The compiler writes in place if the index is applied to a whole input, but copies it for an index to a view.
        self.buffers[buffer].index_put_((parts, *self._index(states.shape[1])), states)

    def move(self, path: Tensor) -> None:
        """Move the keys and values of the accepted nodes `path` [B, C] to the slots right after each row's text."""
        self.append_next(path.shape[1])
        source = (self.lengths[:, None] + path).clamp_max(self.width - 1)
        for buffer in self.buffers:
            parts = torch.arange(len(buffer), device=buffer.device)[:, None, None, None]
            rows, heads, slots = self._index(buffer.shape[2])
            buffer.index_put_((parts, rows, heads, slots), buffer[parts, rows, heads, source[:, None]])

    def _index(self, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of rows [B, 1, 1], KV heads [1, heads, 1] and the slots reserved last [B, 1, N]."""
        assert self.slots is not None
        device = self.slots.device
        rows = torch.arange(self.rows, device=device)[:, None, None]
        return rows, torch.arange(num_heads, device=device)[None, :, None], self.slots[:, None]


Place = tuple[int, int]
"""Where a `FixedCache` holds a layer's keys or values: the index of the buffer, and of the part of this buffer."""


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor as one whose address never changes, so that CUDA graphs can update it in place; returns it."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


class FixedHeadsCache:
    """A `HeadsCache` of fixed shape: one or two KV caches for heads that look back at the text."""

    prefix: FixedCache | None  # of prefix layers, which are decoder layers between backbone and heads, if there are any
    pairs: FixedCache | None  # of pairs (hidden state, token after it), if the heads attend to the text

    def __init__(self, like: HeadsCache, max_depth: int) -> None:
        """Make empty caches for the heads of the cache `like`; `max_depth` is the depth of the heads' draft tree."""
        self.heads: MedusaHeads = like.heads
        self.backbone: Backbone = like.backbone
        self.chain = Topology.of(Tree.chain(max_depth).to(like.backbone.device))
        caches = (like.prefix, like.pairs)
        self.prefix, self.pairs = (None if cache is None else FixedCache(cache) for cache in caches)

    @property
    def caches(self) -> list[FixedCache]:
        return [cache for cache in (self.prefix, self.pairs) if cache is not None]

    def load(self, other: HeadsCache) -> None:
        """Copy the keys and values that the cache `other` holds for the same heads."""
        for cache, source in zip((self.prefix, self.pairs), (other.prefix, other.pairs), strict=True):
            if cache is not None and source is not None:
                cache.load(source)

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, end: Tensor, counts: Tensor) -> Tensor:
        """Append B rows' accepted paths to the caches; returns the heads' input [B, H] at the paths' last nodes.

        `before`, `hidden` and `ids`: see `HeadsCache.path`. `end` [B] is the column of each path's last node, and
        `counts` [B] is the number of nodes that each row keeps, 0 for rows that have ended."""
        hidden, cache = self.heads.join(hidden), self.prefix
        if cache is not None:
            assert self.heads.prefix is not None
            positions = cache.append_next(hidden.shape[1])
            allowed = visible_slots(self.chain, cache.lengths, cache.width)[:, None]
            hidden = self.heads.prefix(hidden, positions, additive(allowed, hidden.dtype), cache)
            cache.lengths.add_(counts)
        cache = self.pairs
        if cache is not None:
            assert isinstance(self.heads, AttendsToText)
            positions = cache.append_next(hidden.shape[1])
            pairs = torch.cat([before[:, None], hidden[:, :-1]], dim=1)
            token = self.heads.embed(ids, self.backbone.embed)
            self.heads.project_kv(pairs, token, positions, cache.update)
            cache.lengths.add_(counts)
        return hidden.gather(1, end[:, None, None].expand(-1, -1, hidden.shape[-1]))[:, 0]

    def context_kv(self) -> ContextKV | None:
        """The keys and values of the text for the next draft; `None` if the heads do not attend to the text."""
        if self.pairs is None:
            return None
        assert isinstance(self.heads, AttendsToText)
        window, kv = self.heads.window, [layer.read() for layer in self.pairs.tree_layers]
        return self.heads.after_text(kv, self.pairs.lengths, None if window is None or window > WIDEST else window)


def window_of(slots: int, device: torch.device) -> Tensor:
    """Make the window of the first `slots` cache slots, a tensor whose size is a symbol of the compiled code."""
    window = static(torch.empty(slots // BLOCK, device=device))
    torch._dynamo.mark_dynamic(window, 0)
    return window


def rounded(slots: int) -> int:
    """Round a number of cache slots up to the next number that caches and windows may have."""
    step = max(STEP, (1 << (slots - 1).bit_length()) // 16)
    return -(-slots // step) * step
