"""Two texts written in turns by one thread, so that readers can compare their speeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from decode.results import DecodingRun, Result, tau
from decode.serve.text_stream import TextPiece, TextStream, joined
from decode.settings import Settings, is_lossy


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
    """Write several texts to their ends, always a step of the text that has taken the least time so far.

    They never compute at the same time, so the time of each is its own. A reader sees each grow at its own pace.
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
    """What a race has shown: how many times as fast drafting was, and whether the texts are the same."""
    faster = Snapshot.at(drafted).tokens_per_second / max(Snapshot.at(plain).tokens_per_second, 1e-9)
    return f"{faster:.2f}×", _texts_compared(plain.result, drafted.result, settings)


def _texts_compared(plain: Result, drafted: Result, settings: Settings) -> str:
    ours, theirs = drafted.new_ids, plain.new_ids
    if "stopped" in (plain.finish_reason, drafted.finish_reason):
        return "stopped: the speeds so far"
    if ours == theirs:
        return "the same text, token for token"
    if is_lossy(settings.rule.name):
        return f"another text: acceptance {settings.rule.name} is lossy"
    if settings.do_sample:
        return "two samples of the same distribution"
    length = min(len(ours), len(theirs))
    parted = next((place for place in range(length) if ours[place] != theirs[place]), length)
    return f"the texts part at token {parted + 1}: a near-tie, rounded otherwise"
