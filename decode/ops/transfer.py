"""Copies between host and device, and other moments at which the host shall not wait.

A host that reads a tensor on a GPU waits until the GPU has finished all that was asked of it, and the GPU then idles
until the host asks for more. A copy from ordinary (pageable) memory to the GPU waits, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor
from torch.distributions import Distribution

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def on_device(numbers: Numbers, device: torch.device) -> Tensor:
    """Make a tensor on `device` of numbers on the host; on a GPU from pinned memory, so that the host does not wait."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def host_waits(device: torch.device) -> bool:
    """Whether the host should avoid reading from `device`, also if that costs the device additional work.

    Not for a CPU. Not for Apple's GPU either, whose random generator PyTorch does not show."""
    return device.type not in ("cpu", "mps")


_LOCK = Lock()
_active = 0  # contexts of `unchecked` that are open, in all threads
_checks = True  # PyTorch's setting before the first of them


@contextmanager
def unchecked() -> Iterator[None]:
    """While the context is open, PyTorch's distributions do not check their arguments, which the host would wait for.

    PyTorch has one setting for all threads, so the distributions of other threads are not checked either."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    """Count open contexts: `change` is 1 or -1. The first context turns the checks off; the last restores them."""
    global _active, _checks
    with _LOCK:
        if not _active:
            _checks = Distribution._validate_args
        _active += change
        Distribution.set_default_validate_args(_checks and not _active)
