"""A setting of the whole process that contexts change, perhaps in several threads at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

Restore = Callable[[], None]


class SharedSetting:
    """Counts the open contexts in all threads: the first of them changes the setting, and the last one restores it."""

    def __init__(self, change: Callable[[], Restore]) -> None:
        """`change` changes the setting, and returns the function that restores it."""
        self._change, self._lock, self._open = change, Lock(), 0

    @contextmanager
    def changed(self) -> Iterator[None]:
        """While the context is open, the setting is changed, also for other threads."""
        with self._lock:
            if not self._open:
                self._restore = self._change()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    self._restore()
