"""The KV cache of tree decoding: append all nodes of a draft tree, then keep the accepted path.

Row b of the batch owns the cache slots [0, lengths[b]), and a token's slot is its position in the text: there are no
holes for padding. A forward appends draft nodes after each row's text; `commit` then moves the accepted nodes to the
first slots after the text and drops the others. Memory is allocated ahead of the text, and written in place.

    lengths 3   slots  t0 t1 t2 | n0 n1 n2 n3      after a forward over the nodes n0..n3
    commit [n0, n2]    t0 t1 t2 n0 n2 |            lengths 5

Shapes: B rows of the batch, H KV heads, S cache slots, D head size, N draft nodes, C columns of a path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.ops.transfer import on_device

MIN_GROWTH, MAX_GROWTH = 256, 4096
"""Bounds on the cache slots that a growing cache adds: its size doubles, but it grows by at most MAX_GROWTH slots."""
SMALL_BYTES, SHARE = 2**26, 0.1
"""A copied arena is in memory twice, so in a cache above SMALL_BYTES an arena holds only this share of the layers."""
Paths = Tensor | list[list[int]] | None
"""The accepted nodes of each row, as `TreeCache.commit` takes them."""


class Arena:
    """One tensor for the keys and values of several layers. One copy then moves a node in all these layers.

    All keys and values of a small cache are in one arena, if they have the same shape."""

    def __init__(self, count: int, like: Tensor, capacity: int) -> None:
        batch, heads, _, size = like.shape
        # Zeros, because uninitialised memory may hold NaN, and a masked NaN still reaches the output as 0 x NaN.
        self.buffer = like.new_zeros(count, batch, heads, capacity, size)  # [count, B, H, S, D]
        self.used = 0
        """Places of the buffer that hold the keys or the values of a layer."""
        self._array: npt.NDArray[np.signedinteger] | None = None  # the buffer's memory, for `move`

    def keep(self, rows: Tensor) -> None:
        """Keep only some rows, by their indices; the memory of all rows is given back."""
        self._array = None
        self.buffer = self.buffer.index_select(1, rows.to(self.buffer.device))

    def move(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy nodes on a CPU, given as (row, old slot, new slot), where no new slot is the old one of a later node.

        NumPy copies a node in a third of the time that PyTorch takes to start its operations."""
        if self._array is None:
            bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[self.buffer.itemsize]
            self._array = self.buffer.view(bits).numpy()  # NumPy does not know bfloat16
        for row, old, new in moves:
            self._array[:, row, :, new] = self._array[:, row, :, old]


class TreeLayer(CacheLayerMixin):
    """One layer of a `TreeCache`, with the interface that transformers' attention calls."""

    is_sliding = False  # our masks limit windows by position, so no key is ever dropped
    keys: Tensor
    values: Tensor

    def __init__(self, owner: TreeCache) -> None:
        super().__init__()
        self.owner = owner
        self.places: list[tuple[Arena, int]] = []  # of keys and of values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # If keys and values have one shape, as in most models, one arena holds both.
        per_layer = 2 if key_states.shape == value_states.shape else 1
        self.places = [self.owner.place(states, per_layer) for states in (key_states, value_states)]
        self.bind()
        self.is_initialized = True

    def bind(self) -> None:
        """Make the layer's `keys` and `values` views of its arenas' buffers, after a buffer was made or replaced."""
        self.keys, self.values = (arena.buffer[index] for arena, index in self.places)

    def grow(self) -> None:
        """Move the keys and values to new arenas of the owner, which have the owner's present capacity."""
        old = self.keys, self.values
        self.lazy_initialization(*old)
        for states, grown in zip(old, (self.keys, self.values), strict=True):
            grown[:, :, : states.shape[2]] = states

    def join(self, other: TreeLayer, rows: int, used: int) -> None:
        """Move the keys and values of both layers to new arenas of the owner: first own rows, then those of `other`.

        The owner then has `rows` rows. The first `used` slots of this layer are kept."""
        mine, theirs = (self.keys, self.values), (other.keys, other.values)
        self.lazy_initialization(*(states[:1].expand(rows, -1, -1, -1) for states in mine))
        for joined, own, new in zip((self.keys, self.values), mine, theirs, strict=True):
            joined[: len(own), :, :used] = own[:, :, :used]
            joined[len(own) :, :, : other.owner.longest] = new[:, :, : other.owner.longest]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, heads, N, head size] of N tokens to B rows; returns those of the whole rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, count = self.owner, key_states.shape[2]
        end = owner.longest + count
        owner.reserve(end)
        owner.pending = count
        if owner.is_even:
            self.keys.narrow(2, owner.longest, count).copy_(key_states)
            self.values.narrow(2, owner.longest, count).copy_(value_states)
        else:
            rows, slots = owner.appended(count, key_states.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)

    def get_seq_length(self) -> int:
        return self.owner.longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.longest + query_length, 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def crop(self, tokens_to_remove: int) -> None:
        raise RuntimeError("a TreeCache keeps what was committed; commit less instead of cropping")


class TreeCache(Cache):
    """A KV cache of transformers whose rows have different lengths, and whose `commit` keeps accepted nodes only."""

    def __init__(self, config: PretrainedConfig, batch_size: int, capacity: int) -> None:
        """Make an empty cache of `capacity` slots per row; it is copied to larger tensors when a text needs more."""
        self.arenas: list[Arena] = []
        self.capacity = capacity
        self.pending = 0  # nodes of the last forward, until they are committed
        self._set([0] * batch_size)
        self.tree_layers = [TreeLayer(self) for _ in range(config.get_text_config(decoder=True).num_hidden_layers)]
        super().__init__(layers=list(self.tree_layers))

    def _set(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.longest = max(lengths, default=0)
        self.is_even = self.longest == min(lengths, default=0)
        self._appended: tuple[Tensor, Tensor] | None = None

    def place(self, states: Tensor, per_layer: int) -> tuple[Arena, int]:
        """Reserve a part of an arena for a layer's keys or values, shaped like `states`; returns arena and part index.

        Each layer needs `per_layer` such parts (1 or 2). If no part is free, makes an arena for uninitialised layers:
        all of them if the cache is small, else at most the share `SHARE` of all layers."""
        for arena in self.arenas:
            buffer = arena.buffer
            same = buffer.shape[2] == states.shape[1] and buffer.shape[4] == states.shape[3]
            if same and buffer.dtype == states.dtype and buffer.device == states.device and arena.used < len(buffer):
                break
        else:  # most models have one shape throughout, so allocate for all layers that have no place yet
            layers, left = len(self.tree_layers), sum(not layer.is_initialized for layer in self.tree_layers)
            needed = layers * per_layer * states[:, :, :1].numel() * states.element_size() * self.capacity
            if needed > SMALL_BYTES:
                left = min(left, max(1, int(layers * SHARE)))
            arena = Arena(per_layer * left, states, self.capacity)
            self.arenas.append(arena)
        arena.used += 1
        return arena, arena.used - 1

    def reserve(self, slots: int) -> None:
        """Grow the buffers of all layers, one after another, to hold at least `slots` cache slots per row."""
        if slots <= self.capacity:
            return
        self.capacity = max(slots + MIN_GROWTH, self.capacity + min(self.capacity, MAX_GROWTH))
        self.arenas = []  # layers hold the old arenas; each arena is freed when its last layer has left it
        moving = [layer for layer in self.tree_layers if layer.is_initialized]
        for layer in moving:
            layer.is_initialized = False
        for layer in moving:
            layer.grow()

    def appended(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The row indices [B, 1] and cache slots [B, count] where the next `count` tokens of each of B rows belong."""
        if self._appended is None or self._appended[1].shape[1] != count:
            start = on_device(self.lengths, device)[:, None]
            rows = torch.arange(len(self.lengths), device=device)[:, None]
            self._appended = rows, start + torch.arange(count, device=device)
        rows, slots = self._appended
        return rows.to(device), slots.to(device)

    def release(self) -> None:
        """Free the memory of all keys and values, after another cache has copied them."""
        self.arenas.clear()
        for layer in self.tree_layers:
            layer.places.clear()
            del layer.keys, layer.values
            layer.is_initialized = False

    def commit_prompt(self, lengths: list[int]) -> None:
        """Keep the first `lengths[b]` of the tokens that the last forward appended to row b, and drop the others."""
        self._set([old + new for old, new in zip(self.lengths, lengths, strict=True)])
        self.pending = 0

    def cut(self, lengths: list[int]) -> None:
        """Shorten each row b to its first `lengths[b]` cache slots, for example to remove padding."""
        self._set(list(lengths))

    def reopen(self, lengths: list[int]) -> None:
        """Shorten row b to `lengths[b]` slots; the slots after them become draft nodes, for `commit` to choose from."""
        self.cut(lengths)
        self.pending = 1

    def commit(self, path: Paths, counts: list[int]) -> None:
        """Keep the accepted nodes `path[b, : counts[b]]` of the last forward in row b, and drop the other nodes.

        `path` [B, C] holds the indices of the nodes on each row's path, padded with any values. If the host knows the
        paths, they are lists of `counts[b]` nodes. `None` says that every path is 0, 1, 2, ..., as in a chain, so that
        no node needs to move."""
        if not self.pending:
            raise RuntimeError("commit() without a forward before it")
        longest = max(counts, default=0)
        if longest > 1 and path is not None:  # a single node is the root, which is already in its place
            self._move(path, longest)
        self._set([old + new for old, new in zip(self.lengths, counts, strict=True)])
        self.pending = 0

    def _move(self, path: Tensor | list[list[int]], longest: int) -> None:
        """Move the nodes on the paths, of which the longest has `longest` nodes, to the first slots after the text."""
        if isinstance(path, list) and all(arena.buffer.is_cpu for arena in self.arenas):
            moves = [
                (row, start + node, start + place)
                for row, (start, line) in enumerate(zip(self.lengths, path, strict=True))
                for place, node in enumerate(line)
                if node != place
            ]
            for arena in self.arenas:
                arena.move(moves)
            return
        if isinstance(path, list):
            path = on_device([line + [0] * (longest - len(line)) for line in path], self.arenas[0].buffer.device)
        for arena in self.arenas:
            self._copy(arena.buffer, path[:, :longest].to(arena.buffer.device), longest)

    def _copy(self, buffer: Tensor, path: Tensor, count: int) -> None:
        if len(self.lengths) == 1:
            start = self.lengths[0]
            buffer.narrow(3, start, count).copy_(buffer.index_select(3, path[0] + start))
            return
        # Rows that keep fewer than `count` nodes also move garbage, into slots that the next forward overwrites.
        rows, slots = self.appended(count, buffer.device)
        buffer[:, rows, :, slots] = buffer[:, rows, :, slots[:, :1] + path.clamp_min(0)]

    def select(self, rows: list[int]) -> None:
        """Keep only the rows with the indices `rows`, because the texts of the other rows have ended."""
        index, filled = torch.tensor(rows), [layer for layer in self.tree_layers if layer.is_initialized]
        for layer in filled:
            del layer.keys, layer.values  # these views would keep the memory of all old buffers until the last copy
        for arena in self.arenas:
            arena.keep(index)
        for layer in filled:
            layer.bind()
        self._set([self.lengths[row] for row in rows])

    def join(self, other: TreeCache) -> None:
        """Append the rows of another cache of the same model, as new texts join; the other cache is used up."""
        self.capacity = max(self.capacity, other.capacity)
        self.arenas, rows = [], len(self.lengths) + len(other.lengths)
        moving = list(zip(self.tree_layers, other.tree_layers, strict=True))
        for mine, _ in moving:
            mine.is_initialized = False
        for mine, theirs in moving:
            mine.join(theirs, rows, self.longest)
        self._set(self.lengths + other.lengths)
