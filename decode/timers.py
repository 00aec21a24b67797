"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time

import torch

STAGES = ("propose", "verify", "accept", "compact", "other")


class Timer:
    """Does nothing; the loop calls it between its stages."""

    def start(self) -> None: ...

    def lap(self, stage: str) -> None: ...


class StageTimer(Timer):
    """Adds up the seconds since the last lap under the name of the stage that they were spent in."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        """`synchronize`: waits for the device, without which a GPU's work shows in a later stage."""
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
    """Seconds that count work done on `device`, for differences.

    On one CPU thread that is the thread's own time: as good as the wall's on an idle machine, far better on a busy one.
    A GPU is waited for.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return thread_time
    if device.type != "cuda":
        return perf_counter

    def waited() -> float:
        torch.cuda.synchronize()
        return perf_counter()

    return waited
