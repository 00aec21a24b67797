"""Timers: where the time of a step goes, and seconds that count the work on a device."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch

from decode.loop import Timer

STAGES = ("propose", "verify", "accept", "compact", "other")


class StageTimer(Timer):
    """Adds up the seconds that each stage of the steps takes."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize` waits for the device; without it, a GPU's work is counted in a later stage."""
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._synchronize = synchronize or (lambda: None)
        self._last = 0.0

    def start(self) -> None:
        self._synchronize()
        self._last = perf_counter()

    def lap(self, stage: str) -> None:
        self._synchronize()
        now = perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


def stopwatch(device: torch.device) -> Callable[[], float]:
    """A clock in seconds that counts work done on `device`, for differences.

    On one CPU thread it is the thread's own time, which is as good as wall time on an idle machine and far better on a
    busy one. A GPU is waited for.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return thread_time
    if device.type != "cuda":
        return perf_counter

    def waited() -> float:
        torch.cuda.synchronize()
        return perf_counter()

    return waited
