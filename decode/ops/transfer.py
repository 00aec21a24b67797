"""Copies between host and device for which the host does not wait.

A host that reads a tensor on a GPU waits until the GPU has finished all that was asked of it, and the GPU then idles
until the host asks for more. A copy from ordinary (pageable) memory to the GPU waits, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def on_device(numbers: Numbers, device: torch.device) -> Tensor:
    """Make a tensor on `device` of numbers on the host; on a GPU from pinned memory, so that the host does not wait."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def keep_rows(tensors: Iterable[Tensor], rows: Sequence[int], dim: int = 0) -> None:
    """Move the rows with the indices `rows` to the beginning of each tensor, in this order; the host does not wait.

    `dim` is the dimension of rows. Only rows that change their places are copied."""
    moved = [row for row, source in enumerate(rows) if row != source]
    for tensor in tensors if moved else ():
        to, source = (on_device(places, tensor.device) for places in (moved, [rows[row] for row in moved]))
        tensor.index_copy_(dim, to, tensor.index_select(dim, source))


class Sent:
    """Numbers on their way from a GPU to the host, which meanwhile can give the GPU more work."""

    def __init__(self, numbers: Tensor) -> None:
        """Start to copy `numbers` to pinned memory of their own, so that the next step may write over them."""
        self.copy = numbers.to("cpu", non_blocking=True, copy=True)
        self.arrival = torch.cuda.Event()
        self.arrival.record(torch.cuda.current_stream(numbers.device))

    def tolist(self) -> list[list[int]]:
        """Wait for the numbers; returns them."""
        self.arrival.synchronize()
        return self.copy.tolist()


def host_waits(device: torch.device) -> bool:
    """Whether the host should avoid reading from `device`, also if that costs the device additional work.

    Not for a CPU. Not for Apple's GPU either, whose random generator PyTorch does not show."""
    return device.type not in ("cpu", "mps")
