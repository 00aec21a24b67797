"""The thread that writes the texts of all chat pages, one answer after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

from decode.serve.generator import TextGenerator
from decode.serve.race import Side, Snapshot, race

REFRESH = 0.08  # seconds between two snapshots of a text that grows
Returned = TypeVar("Returned")


class ChatWorker:
    """One thread that writes texts in the order in which pages ask for them."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator
        self.thread = ThreadPoolExecutor(1, "chat")
        self.turn = asyncio.Lock()
        self.waiting = 0
        """Answers that are asked for and not finished."""

    def call(self, work: Callable[..., Returned], *args: object) -> Returned:
        """Run a function in the thread, and wait for it."""
        return self.thread.submit(work, *args).result()

    async def write(
        self, begin: Callable[[], list[Side]], show: Callable[[list[Snapshot]], None], stopped: threading.Event
    ) -> list[Side]:
        """Write texts to their ends, or until `stopped`.

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
