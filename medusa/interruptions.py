"""SIGINT (Ctrl-C) and SIGTERM during long work: an exception that names what was kept and how to continue."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from medusa.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """What `interruptible` has received: a signal raises `Interrupted` at once, or within `deferred` sets `number`."""

    def __init__(self) -> None:
        self.number = 0  # of the first signal; 0: none
        self.raised = False  # `Interrupted`, which Python swallows in callbacks of weak references and in `__del__`
        self._notice: Callable[[], None] | None = None  # what to call at the first signal, if it only sets `number`
        self._process = os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
        self._before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._receive)

    @contextmanager
    def deferred(self, notice: Callable[[], None]) -> Iterator[None]:
        """Context in which the first signal only sets `number` and calls `notice`; a second one raises at once."""
        self._notice = notice
        try:
            yield
        finally:
            self._notice = None

    def _receive(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:  # a forked worker; the main process ends it
            return
        first, self.number = not self.number, self.number or number
        if first and self._notice is not None:
            self._notice()
            return
        self.restore()
        self.raised = True
        raise Interrupted(number)

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def interruptible(saved: Callable[[], str]) -> Iterator[Signals]:
    """Raise `Interrupted` inside this context at Ctrl-C and SIGTERM; `saved` then says what is kept.

    After that, a signal acts as it did before this context, so that it can end a hanging cleanup. A signal that the
    process ignores, such as SIGINT in the background of a script, stays ignored. Only the main thread receives signals,
    and in other threads this context does nothing."""
    signals = Signals()
    try:
        yield signals
        if signals.raised:
            raise Interrupted(signals.number)
    except KeyboardInterrupt as stopped:
        number = getattr(stopped, "number", signal.SIGINT)
        raise Interrupted(number, getattr(stopped, "saved", "") or saved()) from None
    finally:
        signals.restore()
