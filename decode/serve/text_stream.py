"""Text while it is written: token ids go in step by step, pieces of text come out that never change again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"
"""The character that a tokenizer writes for bytes that are not (yet) a character."""
KEPT_BEFORE = 8  # ids of the text before that the first new ones are decoded with


class TextPiece(NamedTuple):
    """Some characters of a text."""

    text: str
    drafted: bool
    """Whether they were drafted and accepted; otherwise they are a root, decided by the backbone."""


def joined(pieces: Sequence[TextPiece]) -> str:
    """The text of some pieces."""
    return "".join(piece.text for piece in pieces)


class TextStream:
    """The text of one row, piece by piece. Together the pieces are `decode.results.text_of` all ids.

    A token that ends within a character waits for the rest of the character. Text that may be the beginning of a stop
    string waits until that is decided.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """`before`: ids of a text that is continued; they decide whether the new text begins with a space."""
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.ids = list(before[-KEPT_BEFORE:])
        self.start, self.done = 0, len(self.ids)  # ids[start:done] are decoded text, with which new ids are decoded
        self.waiting: list[TextPiece] = []
        self.ended = False
        """Whether a stop string was found."""

    def step(self, ids: Sequence[int]) -> list[TextPiece]:
        """The pieces that become certain with the ids of a step: the root, then the accepted guesses."""
        for place, token in enumerate(ids):
            self.ids.append(token)
            text = self._new_text()
            if text and not text.endswith(INCOMPLETE):
                self._take(text, drafted=place > 0)
        return self._release(self._possible_stop())

    def end(self) -> list[TextPiece]:
        """The pieces that are left when no more ids come."""
        if text := self._new_text():
            self._take(text, drafted=False)
        return self._release(0)

    def _new_text(self) -> str:
        """The text of the ids after `done`. Ids before them are decoded too, because the first of a text may differ."""
        known = self._decode(self.ids[self.start : self.done])
        return self._decode(self.ids[self.start :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    def _take(self, text: str, drafted: bool) -> None:
        self.start, self.done = self.done, len(self.ids)
        if self.ended:
            return
        self.waiting.append(TextPiece(text, drafted))
        waiting = joined(self.waiting)
        cuts = [waiting.index(string) for string in self.stop if string in waiting]
        if cuts:
            self.ended = True
            self.waiting, _ = _split(self.waiting, min(cuts))

    def _possible_stop(self) -> int:
        """How many of the waiting characters may be the beginning of a stop string."""
        if self.ended or not self.stop:
            return 0
        waiting = joined(self.waiting)
        longest = max(map(len, self.stop)) - 1
        lengths = range(min(longest, len(waiting)), 0, -1)
        return next((n for n in lengths if any(string.startswith(waiting[-n:]) for string in self.stop)), 0)

    def _release(self, kept: int) -> list[TextPiece]:
        """All waiting characters but the last `kept`."""
        given, self.waiting = _split(self.waiting, len(joined(self.waiting)) - kept)
        return given


def _split(pieces: Sequence[TextPiece], count: int) -> tuple[list[TextPiece], list[TextPiece]]:
    """The first `count` characters, and the others."""
    first: list[TextPiece] = []
    rest: list[TextPiece] = []
    for piece in pieces:
        count = max(count, 0)
        if count:
            first.append(piece._replace(text=piece.text[:count]))
        if len(piece.text) > count:
            rest.append(piece._replace(text=piece.text[count:]))
        count -= len(piece.text)
    return first, rest
