"""A setting of the whole process that contexts change, perhaps in several threads at once."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Restore = Callable[[], None]


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
