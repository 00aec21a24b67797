"""A text while it is written: the ids of steps in, pieces of text out that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

CUT = "\ufffd"
"""What a tokenizer writes for bytes that are no character (yet)."""


class Piece(NamedTuple):
    """Some letters, and who wrote them."""

    text: str
    drafted: bool
    """Whether they were guessed ahead and accepted; if not, they are a root: the backbone's own choice."""


class TextStream:
    """The text of one row, piece by piece: together the pieces are `decode.results.text_of` all ids.

    What was handed out is never taken back. So a token that ends within a character waits for the rest of it, and what
    may be the beginning of a stop string waits until it is known to be none.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """`before`: ids that the text goes on from, where it does: they decide on a space at its beginning."""
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.ids = list(before[-8:])
        self.start, self.done = 0, len(self.ids)  # ids[start:done] is known text, in which a token is to be read
        self.waiting: list[Piece] = []
        self.ended = False
        """A stop string was met."""

    def step(self, ids: Sequence[int]) -> list[Piece]:
        """The ids of a step: the root, then the guesses that were accepted after it."""
        for place, token in enumerate(ids):
            self.ids.append(token)
            text = self._unread()
            if text and not text.endswith(CUT):
                self._take(text, drafted=place > 0)
        return self._release(self._may_stop())

    def end(self) -> list[Piece]:
        """What is left when no more ids come."""
        if text := self._unread():
            self._take(text, drafted=False)
        return self._release(0)

    def _unread(self) -> str:
        """The text of the ids behind `done`: read together with some before them, as the first of a text may differ."""
        known = self._decode(self.ids[self.start : self.done])
        return self._decode(self.ids[self.start :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _take(self, text: str, drafted: bool) -> None:
        self.start, self.done = self.done, len(self.ids)
        if self.ended:
            return
        self.waiting.append(Piece(text, drafted))
        waiting = self._waiting()
        cuts = [waiting.index(string) for string in self.stop if string in waiting]
        if cuts:
            self.ended = True
            self.waiting = list(_first(self.waiting, min(cuts)))

    def _waiting(self) -> str:
        return "".join(piece.text for piece in self.waiting)

    def _may_stop(self) -> int:
        """How many of the waiting letters may be the beginning of a stop string."""
        if self.ended or not self.stop:
            return 0
        waiting = self._waiting()
        longest = max(map(len, self.stop)) - 1
        lengths = range(min(longest, len(waiting)), 0, -1)
        return next((n for n in lengths if any(string.startswith(waiting[-n:]) for string in self.stop)), 0)

    def _release(self, kept: int) -> list[Piece]:
        """Hand out all waiting letters but the last `kept`."""
        total = sum(len(piece.text) for piece in self.waiting)
        given = list(_first(self.waiting, total - kept))
        self.waiting = list(_behind(self.waiting, total - kept))
        return given


def _first(pieces: Sequence[Piece], count: int) -> Iterator[Piece]:
    """The first `count` letters."""
    for piece in pieces:
        if count > 0:
            yield piece._replace(text=piece.text[:count])
        count -= len(piece.text)


def _behind(pieces: Sequence[Piece], count: int) -> Iterator[Piece]:
    """All letters behind the first `count`."""
    for piece in pieces:
        if len(piece.text) > count:
            yield piece._replace(text=piece.text[max(count, 0) :])
        count -= len(piece.text)
