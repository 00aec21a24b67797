"""Interruptions of a run: the signals that end it after a step, and the clock of checkpoints against sudden ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType

from medusa.errors import Interrupted
from train.callbacks import say

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SAVE_TIMES = 20  # a run spends at most about 5 % of its time on rescue checkpoints


class Signals:
    """Context in which SIGINT and SIGTERM raise `Interrupted`, at once or, within `deferred`, when the caller decides.

    The handlers that were there before are restored at the end. In a thread other than the main thread, Python allows
    no handlers, and this context does nothing."""

    def __init__(self, kept: Callable[[], str] = str) -> None:
        """Make the context; `kept` returns what an interruption at once leaves on disk, for the error's message."""
        self.number = 0  # of the signal that was received; 0: none
        self._kept, self._deferring = kept, False
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        self._process = os.getpid()
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # for example SIGINT of a job in the background
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Context in which the first signal only sets `number`, so that a step can end; a second one raises at once."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker that reads data; the main process ends it
            return
        first, self.number = not self.number, self.number or number
        if first and self._deferring:
            with contextlib.suppress(RuntimeError):  # the signal may have come while another line was printed
                say("interrupted: saving a checkpoint after this step; interrupt again to stop without saving")
            return
        self._restore()  # a further signal acts as it did before
        raise Interrupted(number, self._kept())

    def _restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]


class RescueClock:
    """Clock that says when the next rescue checkpoint is due, so that a sudden end loses little work."""

    def __init__(self, minutes: float) -> None:
        """Make a clock for a checkpoint every `minutes`, or less often if saving is slow; 0: none is ever due."""
        self.minutes, self.save_seconds = minutes, 0.0
        self._last = time.monotonic()

    def start(self) -> None:
        """Start to count, from now."""
        self._last = time.monotonic()

    def saved(self, seconds: float) -> None:
        """Note that a checkpoint has just been saved, which took so many seconds."""
        self.save_seconds, self._last = seconds, time.monotonic()

    @property
    def interval(self) -> float:
        """Seconds between two checkpoints: `minutes`, or `SAVE_TIMES` times the last save if that is longer."""
        return max(60 * self.minutes, SAVE_TIMES * self.save_seconds)

    def due(self) -> bool:
        """Whether a checkpoint is due."""
        return self.minutes > 0 and time.monotonic() - self._last >= self.interval
