"""The states of one recurrent layer in a `TreeCache`.

A forward over a draft changes no state: it leaves what its nodes would change. `commit` then applies the accepted path.
So after a forward that was interrupted, the states are those before it; a commit that was interrupted is not undone.

Shapes: B rows, R >= B rows in memory, N nodes of a forward, C channels, W width of a convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from decode.layers.functions import Update
from decode.layers.reading import Reading, current


class StateLayer(LinearAttentionCacheLayerMixin):
    """The states of one layer, with the interface that transformers' recurrent layers call.

    It says that there is no previous state. So a model's forward takes its way for many tokens, also for one, and calls
    the functions of `decode.layers.switch`, which take the states from here."""

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self.convolved: dict[int, Tensor] = {}
        """By number: the inputs [R, C, W] of a convolution at the last W tokens of each text."""
        self.states: dict[int, Tensor] = {}
        """By number: recurrent states [R, ...], in float32, or in float64 for stable numerics and models in it."""
        self.columns: dict[int, Tensor] = {}  # [B, C, W + N]: those of the texts, and of the nodes read last
        self.updates: dict[int, Update] = {}  # of the states, by the nodes read last
        self.calls = 0  # of recurrences since the last convolution, as Zamba has several in a layer

    def begin(self) -> None:
        """Forget the nodes of the last forward, because another one begins."""
        self.columns.clear()
        self.updates.clear()

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, because states are made where the model asks for them."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Append the inputs [B, C, N] of N nodes to those of the texts; returns [B, C, W + N]."""
        here = current()
        if here is None:
            raise RuntimeError("a model reads states outside of `decode.layers.reading.reading`")
        if state_idx not in self.convolved:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.convolved[state_idx] = conv_states.new_zeros(*conv_states.shape[:2], size)
        self.columns[state_idx] = torch.cat([self.convolved[state_idx][: len(conv_states)], conv_states], dim=-1)
        here.layer, self.calls = self, 0
        return self.columns[state_idx]

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Do nothing: the functions have left their updates here."""
        return recurrent_states

    def next_state(self, here: Reading, *shape: int, like: Tensor) -> tuple[int, Tensor]:
        """The number of the next recurrent state of the forward `here`, and the state [B, *shape], at first zeros."""
        number, rows = self.calls, len(like)
        self.calls += 1
        if number not in self.states:
            dtype = torch.float64 if here.stable else torch.promote_types(like.dtype, torch.float32)
            self.states[number] = torch.zeros(rows, *shape, dtype=dtype, device=like.device)
        return number, self.states[number][:rows]

    def commit(self, reading: Reading, last: Tensor, counts: Tensor) -> None:
        """Move the states along each row's path, which ends at node `last[b]` and has `counts[b]` nodes [B]."""
        for number, columns in self.columns.items():
            kept = self.convolved[number]
            taps = _last_taps(reading, kept.shape[-1], last, counts).to(columns.device)
            kept[: len(columns)] = columns.gather(2, taps[:, None].expand(-1, columns.shape[1], -1))
        if self.updates:
            on_path = _on_path(reading, last, counts)
            for number, update in self.updates.items():
                state = self.states[number][: len(last)]
                update.apply(state, last.clamp_min(0).to(state.device), on_path.to(state.device))
        self.begin()

    @property
    def tensors(self) -> list[Tensor]:
        """All states, [R, ...]."""
        return [*self.convolved.values(), *self.states.values()]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def forget(self) -> None:
        """Begin all texts again."""
        self.begin()
        for tensor in self.tensors:
            tensor.zero_()

    def release(self) -> None:
        """Free the memory of all states, until the next forward."""
        self.begin()
        self.convolved.clear()
        self.states.clear()

    def join(self, other: StateLayer, start: int, count: int) -> None:
        """Take over the `count` rows of another cache, from row `start` on."""
        for mine, theirs in ((self.convolved, other.convolved), (self.states, other.states)):
            for number, tensor in theirs.items():
                held = mine.get(number)
                rows = start + count
                if held is None or len(held) < rows:
                    mine[number] = tensor.new_zeros(rows, *tensor.shape[1:])
                    if held is not None:
                        mine[number][:start] = held[:start]
                mine[number][start:rows] = tensor[:count]
        self.begin()


def _last_taps(reading: Reading, width: int, last: Tensor, counts: Tensor) -> Tensor:
    """The columns [B, W] that are the last W of each row after its path."""
    stays = torch.arange(width, device=last.device)
    if reading.topology is None:
        return counts[:, None] + stays
    taps = reading.taps(width).to(last.device).expand(len(last), -1, -1)
    chosen = taps[torch.arange(len(last), device=last.device), last.clamp_min(0)]
    return torch.where(counts[:, None] > 0, chosen, stays)


def _on_path(reading: Reading, last: Tensor, counts: Tensor) -> Tensor:
    """Which nodes are on each row's path [B, N]; those of a text do not matter."""
    if reading.topology is None:
        return counts[:, None] > 0
    above = reading.topology.ancestors.to(last.device).expand(len(last), -1, -1)
    of_last = above[torch.arange(len(last), device=last.device), last.clamp_min(0)]
    return of_last & (counts[:, None] > 0)
