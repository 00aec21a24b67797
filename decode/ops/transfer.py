"""Copies between host and device, and other moments at which the host shall not wait.

A host that reads a tensor on a GPU waits until the GPU has finished all that was asked of it, and the GPU then idles
until the host asks for more. A copy from ordinary (pageable) memory to the GPU waits, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import Lock

import torch
from torch import Tensor
from torch.distributions import Distribution

Restore = Callable[[], None]
Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def on_device(numbers: Numbers, device: torch.device) -> Tensor:
    """Make a tensor on `device` of numbers on the host; on a GPU from pinned memory, so that the host does not wait."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def host_waits(device: torch.device) -> bool:
    """Whether the host should avoid reading from `device`, also if that costs the device additional work.

    Not for a CPU. Not for Apple's GPU either, whose random generator PyTorch does not show."""
    return device.type not in ("cpu", "mps")


class SharedSetting:
    """A context that changes a setting, also for other threads. It may be open several times, in several threads.

    The first opening changes the setting, and the last one that ends restores it."""

    def __init__(self, change: Callable[[], Restore]) -> None:
        """`change` changes the setting, and returns the function that restores it."""
        self._change, self._lock, self._open = change, Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._open:
                self._restore = self._change()
            self._open += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._restore()


def _turn_checks_off() -> Restore:
    checks = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    return partial(Distribution.set_default_validate_args, checks)


_CHECKS = SharedSetting(_turn_checks_off)


def unchecked() -> AbstractContextManager[None]:
    """While the context is open, PyTorch's distributions do not check their arguments, which the host would wait for.

    PyTorch has one setting for all threads, so the distributions of other threads are not checked either."""
    return _CHECKS
