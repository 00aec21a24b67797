"""Copies from host to device for which the host does not wait.

A host that reads a tensor on a GPU waits until the GPU has finished all that was asked of it, and the GPU then idles
until the host asks for more. A copy from ordinary (pageable) memory to the GPU waits, too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]]


def on_device(numbers: Numbers, device: torch.device) -> Tensor:
    """Make a tensor on `device` of numbers on the host; on a GPU from pinned memory, so that the host does not wait."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def host_waits(device: torch.device) -> bool:
    """Whether the host should avoid reading from `device`, also if that costs the device additional work.

    Not for a CPU. Not for Apple's GPU either, whose random generator PyTorch does not show."""
    return device.type not in ("cpu", "mps")
