"""Signals during long work: what they raise, and when they do nothing."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator

import pytest

from medusa.errors import Interrupted
from medusa.interruptions import SIGNALS, interruptible


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the handlers that were there before a test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_says_what_is_kept(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    with pytest.raises(Interrupted, match="two texts") as stopped, interruptible(lambda: "two texts"):
        os.kill(os.getpid(), number)
    assert stopped.value.number == number
    assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_is_ignored_stays_ignored(number: signal.Signals) -> None:
    """As SIGINT in the background of a script, which otherwise would end with the script's own Ctrl-C."""
    signal.signal(number, signal.SIG_IGN)
    with interruptible(lambda: ""):
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == signal.SIG_IGN


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_callback_of_a_weak_reference_is_not_lost(number: signal.Signals) -> None:
    """Python prints an exception that such a callback raises, and goes on."""

    class Thing:
        pass

    thing = Thing()
    reference = weakref.ref(thing, lambda _: os.kill(os.getpid(), number))
    with pytest.raises(Interrupted, match="two texts") as stopped, interruptible(lambda: "two texts"):
        del thing
    assert reference() is None
    assert stopped.value.number == number
