"""Races: texts that one thread writes in turns, so that a reader can compare their speeds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import NamedTuple, TypeVar

from decode.results import DecodingRun, Result, tau
from decode.serve.texts import TextGenerator, TextPiece, TextStream, joined
from decode.settings import Settings, is_lossy

REFRESH = 0.08  # seconds between two snapshots of a growing text
Returned = TypeVar("Returned")


class Side:
    """One of the texts of a race while it is written."""

    def __init__(self, run: DecodingRun, stream: TextStream) -> None:
        self.run, self.steps, self.stream = run, iter(run), stream
        self.pieces: list[TextPiece] = []
        self.finished = False

    @property
    def result(self) -> Result:
        """The result so far, with its seconds so far."""
        self.run.results[0].seconds = self.run.seconds
        return self.run.results[0]

    @property
    def text(self) -> str:
        return joined(self.pieces)

    def step(self) -> None:
        """Write one step."""
        step = next(self.steps, None)
        self.pieces += self.stream.end() if step is None else self.stream.step(step.ids[0])
        self.finished = step is None

    def stop(self) -> None:
        """End the text now."""
        if not self.finished:
            self.run.stop()
            self.pieces += self.stream.end()
            self.finished = True


def race(sides: Sequence[Side]) -> Iterator[None]:
    """Write several texts to their ends, always one step of the text that has taken the least time so far.

    The texts never compute at the same time, so the time of each is its own, and a reader sees each grow at its own
    pace.
    """
    while unfinished := [side for side in sides if not side.finished]:
        min(unfinished, key=lambda side: side.run.seconds).step()
        yield


class Snapshot(NamedTuple):
    """One side at one moment."""

    pieces: list[TextPiece]
    tokens: int
    seconds: float
    tau: float
    finish_reason: str | None
    """`None` while the text is being written."""

    @classmethod
    def at(cls, side: Side) -> Snapshot:
        """The side as it is now."""
        result = side.result
        reason = result.finish_reason if side.finished else None
        return cls(list(side.pieces), len(result.new_ids), result.seconds, tau([result]), reason)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def verdict(plain: Side, drafted: Side, settings: Settings) -> tuple[str, str]:
    """The outcome of a race: how many times as fast drafting was, and whether the texts are the same."""
    faster = Snapshot.at(drafted).tokens_per_second / max(Snapshot.at(plain).tokens_per_second, 1e-9)
    return f"{faster:.2f}×", _texts_compared(plain.result, drafted.result, settings)


def _texts_compared(plain: Result, drafted: Result, settings: Settings) -> str:
    ours, theirs = drafted.new_ids, plain.new_ids
    if "stopped" in (plain.finish_reason, drafted.finish_reason):
        return "stopped: the speeds so far"
    if ours == theirs:
        return "the same text, token for token"
    if is_lossy(settings.rule.name):
        return f"different texts: acceptance {settings.rule.name} is lossy"
    if settings.do_sample:
        return "two samples of the same distribution"
    length = min(len(ours), len(theirs))
    at = next((place for place in range(length) if ours[place] != theirs[place]), length)
    return f"the texts diverge at token {at + 1}: two tokens are nearly tied, and rounding decides"


class ChatWorker:
    """One thread that writes the answers of all chat pages, in the order in which the pages ask."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator
        self.thread = ThreadPoolExecutor(1, "chat")
        self.turn = asyncio.Lock()
        self.waiting = 0
        """Answers that are asked for and not finished."""

    def call(self, work: Callable[..., Returned], *args: object) -> Returned:
        """Run a function in the thread, and wait for its result."""
        return self.thread.submit(work, *args).result()

    async def write(
        self, begin: Callable[[], list[Side]], show: Callable[[list[Snapshot]], None], stopped: threading.Event
    ) -> list[Side]:
        """Write texts to their ends, or until `stopped`. The list is empty if `stopped` was set before their turn.

        Args:
            begin: starts the texts, in the thread.
            show: receives snapshots while the texts grow, in the caller's thread.

        Raises:
            RequestError: as `begin`."""
        loop = asyncio.get_running_loop()

        def work() -> list[Side]:
            shown = perf_counter()
            sides = begin()
            for _ in race(sides):
                if stopped.is_set():
                    for side in sides:
                        side.stop()
                elif perf_counter() - shown > REFRESH:
                    loop.call_soon_threadsafe(show, [Snapshot.at(side) for side in sides])
                    shown = perf_counter()
            return sides

        self.waiting += 1
        try:
            async with self.turn:
                return [] if stopped.is_set() else await loop.run_in_executor(self.thread, work)
        finally:
            self.waiting -= 1
