"""Texts while they are written: generators start them, and streams turn their token ids into pieces of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.drafters.base import DrafterFactory
from decode.generation import decoding
from decode.request import prepare
from decode.results import DecodingRun
from decode.settings import Settings
from decode.tree_check import require_tree_forward

WARM_UP_STEPS = 5
INCOMPLETE = "\ufffd"
"""The character that a tokenizer writes for bytes that are not (yet) a character."""
KEPT_BEFORE = 8  # ids of the text before that the first new ids are decoded with


@dataclass
class TextGenerator:
    """A backbone with its tokenizer, and a drafter if there is one."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: DrafterFactory | None

    def __post_init__(self) -> None:
        if self.source is not None:
            require_tree_forward(self.model)  # checked once per model, and here so that the first answer does not wait

    def models(self, settings: Settings) -> list[PreTrainedModel]:
        """The models whose contexts a text must fit into."""
        return [self.model, *([] if settings.amateur is None else [settings.amateur.model])]

    def run(self, prompt: Sequence[int], settings: Settings, seed: int = 0, plain: bool = False) -> DecodingRun:
        """Begin to write after `prompt`; `plain`: without the drafter.

        Raises:
            RequestError: as `decode.request.prepare`."""
        start = perf_counter()
        requests = prepare(self.model, [prompt], [seed], **settings.generate_kwargs(self.tokenizer))
        begun = decoding(self.model, None if plain else self.source, requests, settings)
        return DecodingRun(begun, perf_counter() - start)

    def warm_up(self, prompt: Sequence[int], settings: Settings) -> None:
        """Write a few tokens with the drafter and without, so that the first answer is as fast as later ones."""
        for plain in [True] if self.source is None else [True, False]:
            for count, _ in enumerate(self.run(prompt, settings, plain=plain), 1):
                if count == WARM_UP_STEPS:
                    break


class TextPiece(NamedTuple):
    """Some characters of a text."""

    text: str
    drafted: bool
    """Whether the characters were drafted and accepted; otherwise they are a root, decided by the backbone."""


def joined(pieces: Sequence[TextPiece]) -> str:
    """The text of some pieces."""
    return "".join(piece.text for piece in pieces)


class TextStream:
    """The text of one row, in pieces that never change again. Joined, they are `decode.results.text_of` all ids.

    A token that ends within a character waits for the rest of the character. Text that may be the beginning of a stop
    string waits until later text decides.
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
        """The text of the ids after `done`. Earlier ids are decoded too, since the first token of a text may differ."""
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
        if cuts := [waiting.index(string) for string in self.stop if string in waiting]:
            self.ended = True
            self.waiting, _ = _split(self.waiting, min(cuts))

    def _possible_stop(self) -> int:
        """How many of the waiting characters may be the beginning of a stop string."""
        if self.ended or not self.stop:
            return 0
        waiting, longest = joined(self.waiting), max(map(len, self.stop)) - 1
        lengths = range(min(longest, len(waiting)), 0, -1)
        return next((n for n in lengths if any(string.startswith(waiting[-n:]) for string in self.stop)), 0)

    def _release(self, kept: int) -> list[TextPiece]:
        """All waiting characters except the last `kept`."""
        given, self.waiting = _split(self.waiting, len(joined(self.waiting)) - kept)
        return given


def _split(pieces: Sequence[TextPiece], count: int) -> tuple[list[TextPiece], list[TextPiece]]:
    """The first `count` characters, and the others."""
    first, rest = [], []
    for piece in pieces:
        first.append(piece._replace(text=piece.text[:count]))
        rest.append(piece._replace(text=piece.text[count:]))
        count = max(count - len(piece.text), 0)
    return [piece for piece in first if piece.text], [piece for piece in rest if piece.text]
