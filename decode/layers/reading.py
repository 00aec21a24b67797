"""What one forward reads, for recurrent layers: a draft or a piece of text. Each thread is in one forward or none.

Shapes: B rows, N nodes of a draft, W width of a convolution."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from decode.layers.functions import Update
from decode.topology import Topology


class KeepsStates(Protocol):
    """A layer with recurrent states (`decode.layers.recurrent`)."""

    updates: dict[int, Update]
    """Of the states by number, by the nodes read last."""

    def next_state(self, here: Reading, *shape: int, like: Tensor) -> tuple[int, Tensor]:
        """The number of the next recurrent state of the forward `here`, and the state [B, *shape], at first zeros."""


class Reading:
    """One forward over the states of a cache: over a draft of all rows, or over a piece of their texts."""

    def __init__(self, count: int, topology: Topology | None, own: Tensor | None) -> None:
        """Prepare a forward over `count` nodes of a draft's `topology`, or tokens of texts if that is `None`.

        Of text, row b has `own[b]` tokens [B], and then padding; `None`: it has no padding."""
        self.count, self.topology, self.own = count, topology, own
        self.stable = False  # whether states are in float64, so that rounding hides in the order of sums
        self.layer: KeepsStates | None = None  # the one whose inputs were convolved last
        self._taps: dict[int, Tensor] = {}

    def taps(self, width: int) -> Tensor:
        """The columns [B or 1, N, W] that a convolution reads at each node, after W columns of the text."""
        if width not in self._taps:
            assert self.topology is not None
            depth, paths = self.topology.depth, self.topology.paths
            back = depth[:, :, None] - torch.arange(width - 1, -1, -1, device=depth.device)  # depths of the ancestors
            nodes = paths.gather(2, back.clamp_min(0))
            self._taps[width] = width + torch.where(back < 0, back, nodes)
        return self._taps[width]

    def own_tokens(self, device: torch.device) -> Tensor | None:
        """Where a row has tokens of its own [B, count]; `None`: everywhere."""
        if self.own is None:
            return None
        return torch.arange(self.count, device=device) < self.own.to(device)[:, None]

    def next_state(self, *shape: int, like: Tensor) -> tuple[KeepsStates, int, Tensor]:
        """The layer whose function runs, the number of its state, and the state [B, *shape], at first zeros."""
        layer = self.layer
        assert layer is not None, "the layer has convolved nothing before its recurrence"
        return layer, *layer.next_state(self, *shape, like=like)


class _Here(threading.local):
    reading: Reading | None = None  # this thread's forward


_HERE = _Here()


@contextmanager
def reading(current: Reading | None) -> Iterator[None]:
    """While open, the wrapped functions of this thread read for `current`."""
    before, _HERE.reading = _HERE.reading, current
    try:
        yield
    finally:
        _HERE.reading = before


def current() -> Reading | None:
    """This thread's forward over states, if it is in one."""
    return _HERE.reading
