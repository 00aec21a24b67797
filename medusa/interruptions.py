"""SIGINT (Ctrl-C) and SIGTERM during long work: an exception that names what was kept and how to continue."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from medusa.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible(saved: Callable[[], str]) -> Iterator[None]:
    """Raise `Interrupted` inside this context at Ctrl-C and SIGTERM; `saved` then says what is kept.

    A second signal acts as it did before this context, so that it can end a hanging cleanup. A signal that the process
    ignores, such as SIGINT in the background of a script, stays ignored. Only the main thread receives signals."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if is_main else {}
    before = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def stop(number: int, frame: object) -> None:
        restore()
        raise Interrupted(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt as stopped:
        number = getattr(stopped, "number", signal.SIGINT)
        raise Interrupted(number, getattr(stopped, "saved", "") or saved()) from None
    finally:
        restore()
