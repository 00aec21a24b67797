"""The KV cache of tree decoding: append all nodes of a draft tree, then keep the accepted path.

Row b of the batch owns the cache slots [0, lengths[b]), and a token's slot is its position in the text: there are no
holes for padding. A forward appends draft nodes after each row's text; `commit` then moves the accepted nodes to the
first slots after the text and drops the others. Memory is allocated ahead of the text, and written in place.

    lengths 3   slots  t0 t1 t2 | n0 n1 n2 n3      after a forward over the nodes n0..n3
    commit [n0, n2]    t0 t1 t2 n0 n2 |            filled 5, and lengths 5 after `count`

One forward takes four calls. `open` is for the host: it makes room, and sets the window, the slots that attention
reads. `append` and `commit` use tensors only, so that they can be part of a compiled step. The host
learns how many nodes were committed (`filled`) when it reads the accepted tokens, and `count` then tells the cache.

Shapes: B rows of the batch, H KV heads, S cache slots, W of them in the window, D head size, N nodes of a forward,
C columns of a path."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from decode.layers.attention import BothLayer, Place, TreeLayer
from decode.layers.reading import Reading
from decode.layers.recurrent import StateLayer
from decode.ops.attention import Run, runs_of
from decode.ops.transfer import keep_rows, on_device
from decode.topology import Topology
from medusa.errors import RequestError
from medusa.tree_support import LayerTypes, slot_limit

MIN_GROWTH, MAX_GROWTH = 256, 4096
"""Bounds on the slots by which a growing cache grows: its size doubles, but it grows by at most MAX_GROWTH slots."""
LARGE_BYTES, LARGE_GROWTH = 2**30, 8
"""A cache above LARGE_BYTES grows by one LARGE_GROWTHth only, or many texts could take twice the memory they need."""
SMALL_BYTES, SHARE = 2**26, 0.1
"""A buffer is in memory twice while it grows. In a cache above SMALL_BYTES it holds only this share of the layers."""
ALIGNMENT = 64
"""Bytes at whose multiples PyTorch's own tensors on a CPU begin."""
BLOCK = 256
"""Slots by which the windows and buffers of compiled steps grow. So the compiler knows that rows of masks, and of their
parts (`decode.ops.attention`), are aligned."""

Index = tuple[Tensor, Tensor, Tensor]
"""Indices of rows [B, 1, 1], KV heads [1, H, 1] and slots [B, 1, N]."""


class TreeCache(Cache):
    """A KV cache of transformers whose rows have different lengths, and whose `commit` keeps accepted nodes only.

    Recurrent layers have states instead (`decode.layers.recurrent`), which follow the same verbs."""

    def __init__(
        self, config: PretrainedConfig, batch_size: int, capacity: int, device: torch.device, fixed: bool = False
    ) -> None:
        """Make an empty cache of `capacity` slots per row; it is copied to larger tensors when a text needs more.

        The numbers of slots are on `device`, as the tokens are. Layers may be on other devices. A `fixed` cache is for
        compiled steps: after `for_steps`, its windows are whole blocks, and never as wide as its buffers. It keeps all
        rows in memory: those of texts come first, and the others are empty."""
        self.most = slot_limit(config.get_text_config(decoder=True))  # slots that texts and drafts may fill
        self.buffers: list[Tensor] = []  # [parts, B or more, H, S, D]; a part is one layer's keys or values
        self.used: list[int] = []  # parts of each buffer that a layer has taken
        self.capacity, self.fixed, self.block = rounded(capacity) if fixed else capacity, fixed, 1
        self.lengths = [0] * batch_size
        """Slots that the text of each row fills, as the host knows: `commit` does not change them, `count` does."""
        self.filled = self.all_filled = torch.zeros(batch_size, dtype=torch.long, device=device)
        """The same on the device [B], always with what was committed; 0 for empty rows. `all_filled`: see `show`."""
        self.window = torch.empty(0, device=device)
        """An element for each `block` of the window. Only their number counts: compiled code reads the width off it."""
        self.room = 0  # nodes after each text, for which `open` made room last
        self.even: int | None = 0  # where all rows write next, if the host knows one slot for all
        self.slots: Tensor | None = None  # during a forward: the slots [B, N] to which its N nodes are written
        self.indices: dict[tuple[int, torch.device], Index] = {}  # of these slots, for eager forwards
        self.reading: Reading | None = None  # what the next forward reads, for the states
        types = LayerTypes(config.get_text_config(decoder=True)).attends_and_has_states
        layers = [self._layer(*kind) for kind in types]  # those that keep nothing are never called
        attend = [layer for layer, (attends, _) in zip(layers, types, strict=True) if attends]
        self.tree_layers = [layer for layer in attend if isinstance(layer, TreeLayer)]
        self.state_layers = [layer for layer in layers if isinstance(layer, StateLayer)]
        super().__init__(layers=[*layers])

    def _layer(self, attends: bool, num_states: int) -> TreeLayer | StateLayer:
        if not num_states:
            return TreeLayer(self)
        return BothLayer(self, num_states) if attends else StateLayer(num_states)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def width(self) -> int:
        """The number of slots that attention reads, W."""
        return self.window.shape[0] * self.block

    @property
    def is_compiled(self) -> bool:
        """Whether compiled steps write to the cache (`for_steps`); the host then calls `open` before each of them."""
        return self.block > 1

    def for_steps(self, compiled: bool) -> None:
        """Let compiled steps write to the cache, or eager forwards."""
        self.block = BLOCK // 2 if compiled else 1  # for one element, torch.compile would make code of its own
        for layer in self.tree_layers:
            layer.is_compileable = compiled  # then the model makes a causal mask even where its attention needs none

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (*self.buffers, *self.states))

    @property
    def states(self) -> list[Tensor]:
        """The states of recurrent layers, [R, ...] for R rows in memory."""
        return [state for layer in self.state_layers for state in layer.tensors]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return super().get_seq_length(layer_idx) if self.tree_layers else self.longest  # transformers asks attention

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, layer_idx) if self.tree_layers else (self.width, 0)

    def open(self, count: int) -> None:
        """Make room for `count` nodes after each text, and let attention see them; call it before `append`.

        Buffers that are too small grow, which moves them. Compiled steps see whole blocks."""
        longest, self.room = self.longest, count
        end = rounded(longest + count) if self.is_compiled else longest + count
        if self.most is not None and (needed := longest + count) > self.most:  # a window may end beyond
            raise RequestError(
                f"the model has {self.most} slots, and text and draft need {needed}; take a smaller tree"
            )
        if end > self.capacity:
            large = sum(buffer.nbytes for buffer in self.buffers) > LARGE_BYTES
            more = self.capacity // LARGE_GROWTH if large else self.capacity
            self.make_room(max(end + MIN_GROWTH, self.capacity + min(more, MAX_GROWTH)))
        if end != self.width:
            self.window = torch.empty(end // self.block, device=self.window.device)
        self.even = longest if not self.is_compiled and longest == min(self.lengths, default=0) else None

    def append(self, count: int, topology: Topology | None = None, own: Tensor | None = None) -> Tensor:
        """Reserve the `count` slots after each text for the next forward; returns their positions [B, count].

        States need to know what the forward reads: the `topology` of a draft, or else a piece of text. Then row b has
        `own[b]` tokens [B] and padding after them; by default, all rows have `count` tokens."""
        self.indices.clear()
        if self.state_layers:
            self.reading = Reading(count, topology, own)
            for layer in self.state_layers:
                layer.begin()
        self.slots = self.filled[:, None] + torch.arange(count, device=self.filled.device)
        return self.slots

    def runs(self) -> tuple[Run, ...]:
        """The runs of rows for attention of the next forward; none on a GPU, and in compiled steps."""
        if self.is_compiled or self.filled.device.type != "cpu" or len(self.lengths) == 1 or not self.buffers:
            return ()
        per_slot = 2 * max(buffer[0, 0, :, 0].nbytes for buffer in self.buffers)  # keys and values of a layer
        return runs_of([min(length + self.room, self.width) for length in self.lengths], per_slot)

    def commit(self, path: Tensor | None, counts: Tensor) -> None:
        """Keep the accepted nodes `path[b, : counts[b]]` behind row b's text, and drop the other nodes.

        `path` [B, C] holds the indices of the nodes on each row's path, padded with any values. `None` says that every
        path is 0, 1, 2, ..., as in a chain, so that no node needs to move. The host calls `count` when it knows."""
        if self.slots is None:
            raise RuntimeError("commit() without a forward before it")
        counts = counts.to(self.filled.device)
        if path is not None and path.shape[1] > 1:  # a single node is the root, which is already in its place
            self._move(path.to(self.filled.device), counts)
        if self.reading is not None:
            last = counts - 1
            if path is not None:
                last = path.to(counts.device).gather(1, last.clamp_min(0)[:, None])[:, 0]
            for layer in self.state_layers:
                layer.commit(self.reading, last, counts)
            self.reading = None
        self.filled.add_(counts)
        self.slots = None  # a tensor that a compiled step leaves in an attribute is one more result of its code

    def count(self, counts: Sequence[int]) -> None:
        """Tell how many nodes `counts` of each text were committed."""
        self.lengths = [length + number for length, number in zip(self.lengths, counts, strict=True)]

    def keep(self, counts: Sequence[int], path: Sequence[Sequence[int]] | None = None) -> None:
        """Commit and count what the host has decided: the first `counts[b]` nodes of row b, or those of its path."""
        device, most = self.filled.device, max(counts, default=0)
        lines = None if path is None else on_device([[*line] + [0] * (most - len(line)) for line in path], device)
        self.commit(lines, on_device(counts, device))
        self.count(counts)

    def cut(self, lengths: Sequence[int]) -> None:
        """Shorten each row b to its first `lengths[b]` slots. States can only begin again, with all lengths 0."""
        if self.state_layers and list(lengths) != self.lengths:
            if any(lengths):
                raise RuntimeError("states of recurrent layers cannot go back; commit less instead")
            for layer in self.state_layers:
                layer.forget()
        self.lengths = list(lengths)
        self.filled.copy_(on_device(self.lengths, self.filled.device))
        self.even = self.lengths[0] if len({*self.lengths}) == 1 and not self.is_compiled else None

    def read(self, place: Place) -> Tensor:
        """The keys or values [B, H, W, D] of one layer in the window."""
        return self.buffers[place.buffer][place.part, : len(self.filled), :, : self.width]

    def write(self, place: Place, states: Tensor) -> None:
        """Write keys or values [B, H, N, D] of one layer to the slots reserved last."""
        buffer = self.buffers[place.buffer]
        if self.even is not None:  # a view is written in a third of the time
            buffer[place.part, : len(states)].narrow(2, self.even, states.shape[2]).copy_(states)
            return
        if not self.is_compiled:  # all layers write to the same slots
            key = states.shape[1], states.device
            if key not in self.indices:
                self.indices[key] = self._index(*key)
            buffer[place.part].index_put_(self.indices[key], states)
            return
        # The compiler writes in place if the index is applied to a whole input, but copies it for an index to a view.
        part = torch.full((1, 1, 1), place.part, device=states.device)
        buffer.index_put_((part, *self._index(states.shape[1], states.device)), states)

    def _move(self, path: Tensor, counts: Tensor) -> None:
        """Copy the first `counts[b]` nodes of each row's path [B, C] to the slots right after its text."""
        # Padding repeats the last node: slots of its own could lie beyond the window.
        column = torch.arange(path.shape[1], device=path.device).minimum(counts[:, None] - 1).clamp_min(0)
        source = self.filled[:, None] + path.gather(1, column).clamp_min(0)
        self.slots = self.filled[:, None] + column
        for buffer in self.buffers:
            parts = torch.arange(len(buffer), device=buffer.device)[:, None, None, None]
            rows, heads, slots = self._index(buffer.shape[2], buffer.device)
            moved = buffer[parts, rows, heads, source[:, None].to(buffer.device)]
            buffer.index_put_((parts, rows, heads, slots), moved)

    def _index(self, num_heads: int, device: torch.device) -> Index:
        """Indices of rows [B, 1, 1], KV heads [1, H, 1] and the slots reserved last [B, 1, N]."""
        assert self.slots is not None
        rows = torch.arange(len(self.slots), device=device)[:, None, None]
        return rows, torch.arange(num_heads, device=device)[None, :, None], self.slots[:, None].to(device)

    def place(self, states: Tensor, per_layer: int) -> Place:
        """Take a part of a buffer for a layer's keys or values, shaped like `states`.

        Each layer needs `per_layer` such parts (1 or 2). If no part is free, makes a buffer for uninitialised layers:
        all of them if the cache is small, else at most the share `SHARE` of all layers."""
        for number, buffer in enumerate(self.buffers):
            same = buffer.shape[2] == states.shape[1] and buffer.shape[4] == states.shape[3]
            like = same and buffer.dtype == states.dtype and buffer.device == states.device
            if like and self.used[number] < len(buffer):
                self.used[number] += 1
                return Place(number, self.used[number] - 1)
        # Most models have one shape throughout, so allocate for all layers that have no place yet.
        layers, left = len(self.tree_layers), sum(not layer.is_initialized for layer in self.tree_layers)
        needed = layers * per_layer * states[:, :, :1].numel() * states.element_size() * self.capacity
        if needed > SMALL_BYTES:
            left = min(left, max(1, int(layers * SHARE)))
        self.buffers.append(
            self._buffer(per_layer * left, len(self.all_filled if self.fixed else self.lengths), states)
        )
        self.used.append(1)
        return Place(len(self.buffers) - 1, 0)

    def _buffer(self, parts: int, rows: int, like: Tensor) -> Tensor:
        # Zeros, because uninitialised memory may hold NaN, and a masked NaN still reaches the output as 0 x NaN.
        # A window as wide as its buffer would lie in one piece, for which torch.compile makes other code.
        slots = self.capacity + (BLOCK if self.fixed else 0)
        return zeros((parts, rows, like.shape[1], slots, like.shape[-1]), like)

    def _enlarge(self, rows: int) -> None:
        """Move all keys and values, buffer after buffer, to buffers of at least so many rows and `capacity` slots."""
        for number, old in enumerate(self.buffers):
            new = self._buffer(len(old), max(rows, old.shape[1]), old[0])
            live, kept = len(self.lengths), min(old.shape[3], new.shape[3])
            new[:, :live, :, :kept] = old[:, :live, :, :kept]
            self.buffers[number] = new

    def make_room(self, capacity: int, rows: int = 0) -> None:
        """Move all keys and values, buffer after buffer, to buffers of at least `capacity` slots and so many `rows`."""
        self.capacity = max(rounded(capacity) if self.fixed else capacity, self.capacity)
        self._enlarge(max(rows, len(self.lengths)))

    def reserve(self, rows: int) -> None:
        """Have memory for so many rows, before texts `join` a few at a time, each of which would move all others."""
        if any(buffer.shape[1] < rows for buffer in self.buffers):
            self.make_room(self.capacity, rows)

    def restart(self, capacity: int) -> None:
        """Begin with empty rows, for other texts; buffers that have `capacity` slots stay where they are.

        No earlier text may remain in them: a masked NaN would still reach the output, as 0 x NaN."""
        self.show(len(self.all_filled))
        self.cut([0] * len(self.all_filled))
        for buffer in self.buffers:
            buffer.zero_()
        if capacity > self.capacity:
            self.make_room(capacity)

    def empty(self) -> None:
        """Drop all texts of a fixed cache, as others `join`, which overwrite the rows that they take."""
        self.lengths = []
        self.all_filled.zero_()

    def show(self, rows: int) -> None:
        """Let forwards read and write so many rows of a fixed cache, its first ones."""
        self.filled = self.all_filled[:rows]

    def release(self) -> None:
        """Free the memory of all keys and values, until the next forward."""
        self.capacity = 0
        self.buffers = [buffer[:, :, :, :0].clone() for buffer in self.buffers]
        for layer in self.state_layers:
            layer.release()

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the texts of `rows`, in this order. Memory of other rows stays, in a fixed cache as empty rows."""
        keep_rows(self.buffers, rows, dim=1)
        keep_rows(self.states, rows)
        if self.fixed:
            keep_rows((self.all_filled,), rows)
            self.all_filled[len(rows) :] = 0
        else:
            self.filled = self.filled[on_device(rows, self.filled.device).long()]
        self.lengths = [self.lengths[row] for row in rows]
        self.slots = None

    def join(self, other: TreeCache) -> None:
        """Append the rows of another cache of the same model, which is used up; a fixed one must have empty rows."""
        for layer, of_other in zip(self.tree_layers, other.tree_layers, strict=True):
            if not layer.is_initialized and of_other.is_initialized:
                layer.lazy_initialization(*(other.buffers[place.buffer][place.part] for place in of_other.places))
        start, held = len(self.lengths), other.longest
        end = start + len(other.lengths)
        if held > self.capacity or any(buffer.shape[1] < end for buffer in self.buffers):
            self.make_room(other.capacity, end)
        self.lengths, self.slots = [*self.lengths, *other.lengths], None
        for layer, of_other in zip(self.tree_layers, other.tree_layers, strict=True):
            for (number, part), place in zip(layer.places, of_other.places, strict=True):
                own = self.buffers[number][part, start:end]
                own[:, :, :held] = other.buffers[place.buffer][place.part, :, :, :held]
                own[:, :, held:] = 0  # of an ended text, whose keys may be NaN (`_buffer`)
        for mine, theirs in zip(self.state_layers, other.state_layers, strict=True):
            mine.join(theirs, start, end - start)
        if self.fixed:
            self.all_filled[start:end] = other.filled
        else:
            self.filled = torch.cat([self.filled, other.filled])


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Make zeros with the dtype and device of `like`. On a CPU, memory is not taken before it is used.

    PyTorch would write them: 3.3 GB in 2 seconds for 112 texts of 1,296 slots of SmolLM2, of which few are long."""
    size = prod(shape) * like.element_size()
    if like.device.type != "cpu" or not size:
        return like.new_zeros(shape)
    try:
        memory = np.zeros(size + ALIGNMENT, np.uint8)
    except MemoryError:
        return like.new_zeros(shape)  # raises the error that callers know
    start = -memory.ctypes.data % ALIGNMENT
    return torch.frombuffer(memory, dtype=like.dtype, count=prod(shape), offset=start).view(*shape)


def most_slots(tokens: int) -> int:
    """Return the number of slots that a large cache may have once a text has so many tokens."""
    return tokens + max(MIN_GROWTH, tokens // LARGE_GROWTH)


def rounded(slots: int) -> int:
    """Round a number of slots up to the next number that buffers and windows of compiled steps may have.

    It is a multiple of 256, and from 2048 on it grows by up to an eighth, so that few graphs are recorded."""
    step = max(BLOCK, (1 << (slots - 1).bit_length()) // 16)
    return -(-slots // step) * step
