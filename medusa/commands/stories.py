"""Stories of `medusa demo`: generated texts with the time of every piece, replayed side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from decode.texts import TextGenerator
from medusa.records.pieces import TextStream

SLOWER = 10  # the factor by which the stories are shown slower than they were generated


class Story:
    """A generated story: the pieces of its text, each with the seconds from the story's start to the piece."""

    def __init__(self, title: str, write: TextGenerator, prompt: list[int]) -> None:
        assert write.tokenizer is not None, "the shipped model has a tokenizer"
        steps, stream = list[tuple[float, list[int]]](), TextStream(write.tokenizer)
        write([prompt])  # warm-up
        start = time.perf_counter()
        self.result = write([prompt], lambda row, ids: steps.append((time.perf_counter() - start, ids)))[0]
        self.seconds = steps[-1][0]
        self.title = f"{title}: {len(self.result.new_ids) / self.result.seconds:.0f} tokens/s, {len(steps)} steps"
        self.pieces = [(seconds, piece) for seconds, ids in steps for piece in stream.step(ids)]
        self.pieces += [(self.seconds, piece) for piece in stream.end()]

    def until(self, seconds: float) -> Text:
        """Return the text generated in the first `seconds` seconds, with accepted drafted tokens in green."""
        pieces = [piece for generated, piece in self.pieces if generated <= seconds]
        return Text.assemble(*((piece.text, "green" if piece.drafted else "") for piece in pieces))


def play(console: Console, stories: Sequence[Story]) -> None:
    """Replay in slow motion how the stories grew, side by side. Without a terminal, print only the whole stories."""
    width, end = max(30, console.width // 2 - 2), max(story.seconds for story in stories)
    height = 2 + max(6, 1300 // width)

    def frame(seconds: float) -> Columns:
        return Columns(Panel(story.until(seconds), title=story.title, width=width, height=height) for story in stories)

    if not console.is_terminal:
        console.print(frame(end))
        return
    console.print(f"    (shown {SLOWER} times slower than generated)")
    start = time.perf_counter()
    with Live(console=console, refresh_per_second=12) as live:
        while (shown := (time.perf_counter() - start) / SLOWER) < end:
            live.update(frame(shown))
            time.sleep(0.05)
        live.update(frame(end))
