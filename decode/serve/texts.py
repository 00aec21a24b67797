"""Texts of the server and the chat: decoding starts here, and token ids become pieces of text while they arrive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from time import perf_counter
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.drafters.base import DrafterFactory
from decode.generation import decoding
from decode.request import prepare
from decode.results import DecodingRun
from decode.settings import Settings
from decode.stop_strings import TokenBytes, special_ids
from decode.strategies.grammar import Grammars
from decode.tree_check import require_tree_forward

INCOMPLETE = "\ufffd"  # tokenizers return this character for an incomplete or invalid UTF-8 character
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of one byte, in tokenizers that fall back on bytes
KEPT_BEFORE = 8  # ids of the earlier text with which new ids are decoded, since a token's text may depend on them


class TextPiece(NamedTuple):
    """A piece of decoded text, either from accepted guesses of the drafter or predicted by the backbone itself."""

    text: str
    drafted: bool  # whether it comes from accepted guesses; otherwise it is a root, which the backbone itself predicted
    step: int = 0  # the index of the decoding step that completed the piece
    shown: bool = True  # otherwise it only serves to find stop strings, such as the name of a special token


def joined(pieces: Sequence[TextPiece]) -> str:
    return "".join(piece.text for piece in pieces)


class TextStream:
    """Converts the token ids of one text to pieces of text, step by step. A piece never changes after its return.

    A token that ends inside a character waits for the rest of the character, and tokens of single bytes wait for
    another token: an invalid byte makes all bytes beside it invalid. Text that may be the beginning of a stop string
    waits until more text shows whether it is, and so do spaces that the tokenizer may remove. All pieces joined equal
    `decode.results.text_of` of all ids."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] | None = (),
        before: Sequence[int] = (),
        keeps_special: bool = False,
    ) -> None:
        """Make an empty stream. The token ids `before` precede the text and decide whether it begins with a space.

        `keeps_special`: the text holds special tokens."""
        self.tokenizer, self.stop, self.keeps_special = tokenizer, tuple(stop or ()), keeps_special
        self.hidden = frozenset[int]() if keeps_special else special_ids(tokenizer)
        self.names: list[tuple[int, str]] = []
        """Hidden tokens after the last piece: a place in the text of the new ids, and the name, for stop strings."""
        self.cleans, self.raw = cleans_up(tokenizer), list[TextPiece]()  # text from which spaces may still be removed
        self.ids = list(before[-KEPT_BEFORE:])
        self.start, self.done = 0, len(self.ids)  # ids[start:done] were converted, and give new ids their context
        self.waiting: list[TextPiece] = []
        self.steps = 0  # number of decoding steps so far
        self.ended = False  # whether the text contains a stop string, which ends it

    def step(self, ids: Sequence[int]) -> list[TextPiece]:
        """Add the token ids of a decoding step, root first, and return the pieces of text that can no longer change."""
        for place, token in enumerate(ids):
            self.ids.append(token)
            text = self._new_text()
            if self.stop and token in self.hidden and not self.cleans:
                self.names.append((len(text), str(self.tokenizer.convert_ids_to_tokens(token))))
            if not text:
                self._wait(self._pieces("", drafted=False))
            elif not text.endswith(INCOMPLETE) and not self._ends_with_byte():
                self._take(text, drafted=place > 0)
        self.steps += 1
        return self._release(self._possible_stop())

    def end(self) -> list[TextPiece]:
        """End the text, and return the pieces of text that were held back."""
        if text := self._new_text():
            self._take(text, drafted=False)
        self._wait(self._cleaned(len(joined(self.raw))))
        return self._release(0)

    def _new_text(self) -> str:
        """Return the text of the token ids that are not yet converted; some earlier ids are decoded as context."""
        known = self._decode(self.ids[self.start : self.done])
        return self._decode(self.ids[self.start :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        kept = {"clean_up_tokenization_spaces": False} if self.cleans else {}
        return str(self.tokenizer.decode(ids, skip_special_tokens=not self.keeps_special, **kept)) if ids else ""

    def _ends_with_byte(self) -> bool:
        """Whether the last token that is not hidden is one of a single byte."""
        last = next((token for token in reversed(self.ids[self.done :]) if token not in self.hidden), None)
        return last is not None and BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(last))) is not None

    def _pieces(self, text: str, drafted: bool) -> list[TextPiece]:
        """Split the text of the new ids at the special tokens among them, whose names are pieces that are not shown."""
        pieces, start = list[TextPiece](), 0
        for place, name in self.names:
            names = TextPiece(name, drafted, self.steps, shown=False)
            pieces += [TextPiece(text[start:place], drafted, self.steps), names]
            start = place
        self.names = []
        return [piece for piece in (*pieces, TextPiece(text[start:], drafted, self.steps)) if piece.text]

    def _take(self, text: str, drafted: bool) -> None:
        if self.stop and self.done == 0:
            first = next((token for token in self.ids if token not in self.hidden), self.ids[0])
            if TokenBytes(self.tokenizer)(first).startswith(b" ") and not text.startswith(" "):
                self._wait([TextPiece(" ", drafted, shown=False)])  # a stop string may begin with it
        self.start, self.done = self.done, len(self.ids)
        pieces = self._pieces(text, drafted)
        if not self.cleans:
            self._wait(pieces)
            return
        self.raw += pieces
        raw = joined(self.raw)
        # Between two words, but not after an apostrophe, or after n, which may be the beginning of n't.
        cuts = (at for at in range(len(raw) - 1, 0, -1) if raw[at] == " " and raw[at - 1] not in " '")
        self._wait(self._cleaned(next((at for at in cuts if raw[max(at - 2, 0) : at] not in (" n", "n")), 0)))

    def _cleaned(self, count: int) -> list[TextPiece]:
        """Take the first `count` characters of the text from which spaces may be removed, and remove them."""
        pieces, self.raw = _split(self.raw, count)
        whole = joined(pieces)
        rest = self.tokenizer.clean_up_tokenization(whole) if self.cleans else whole
        cleaned = []
        for piece in pieces:
            kept = ""
            for character in piece.text:
                if rest.startswith(character):
                    kept, rest = kept + character, rest[1:]
            cleaned.append(piece._replace(text=kept))
        return cleaned

    def _wait(self, pieces: Sequence[TextPiece]) -> None:
        """Add pieces of text to those that wait; at a stop string, the text ends."""
        if self.ended:
            return
        self.waiting += pieces
        waiting = joined(self.waiting)
        if cuts := [waiting.index(string) for string in self.stop if string in waiting]:
            self.ended = True
            self.waiting, _ = _split(self.waiting, min(cuts))

    def _possible_stop(self) -> int:
        """Count the characters at the end of the held-back text that may begin a stop string."""
        waiting = "" if self.ended else joined(self.waiting)
        lengths = range(len(waiting), 0, -1)
        return next((n for n in lengths if any(string.startswith(waiting[-n:]) for string in self.stop)), 0)

    def _release(self, kept: int) -> list[TextPiece]:
        """Return the pieces of text held back so far, except their last `kept` characters, which stay held back."""
        given, self.waiting = _split(self.waiting, len(joined(self.waiting)) - kept)
        return [piece for piece in given if piece.shown]


def _split(pieces: Sequence[TextPiece], count: int) -> tuple[list[TextPiece], list[TextPiece]]:
    """Split pieces of text into those before and those after the first `count` characters of the whole text."""
    first, rest = [], []
    for piece in pieces:
        first.append(piece._replace(text=piece.text[:count]))
        rest.append(piece._replace(text=piece.text[count:]))
        count = max(count - len(piece.text), 0)
    return [piece for piece in first if piece.text], [piece for piece in rest if piece.text]


def cleans_up(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer removes spaces, such as those before full stops, from the whole text that it decodes."""
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    corrupts = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    return bool(tokenizer.clean_up_tokenization_spaces) and (type(model).__name__ != "BPE" or bool(corrupts))


WARM_UP_STEPS = 5


@dataclass
class TextGenerator:
    """A backbone with its tokenizer and, if given, a drafter. It starts the decoding of texts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: DrafterFactory | None

    def __post_init__(self) -> None:
        if self.source is not None:
            require_tree_forward(self.model)  # a check once per model, done now so that the first answer is fast

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """What each token adds to a text, for stop strings."""
        return TokenBytes(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles grammars; the first use takes about a second, and raises a `RequestError` without llguidance."""
        return Grammars(self.model, self.tokenizer)

    def models(self, settings: Settings) -> list[PreTrainedModel]:
        """List the models whose contexts must hold the text: the backbone, and the amateur of contrastive decoding."""
        return [self.model, *([] if settings.amateur is None else [settings.amateur.model])]

    def run(
        self,
        prompt: Sequence[int],
        settings: Settings,
        seed: int = 0,
        plain: bool = False,
        source: DrafterFactory | None = None,
        keep_drafts: bool = False,
    ) -> DecodingRun:
        """Start decoding after the token ids `prompt`, or raise a `RequestError`. `plain`: do not use a drafter.

        `source`: draft with this drafter instead of the generator's own. `keep_drafts`: see `decode.steps`."""
        start = perf_counter()
        requests = prepare(self.model, [prompt], [seed], **settings.generate_kwargs(self.tokenizer))
        drafter = None if plain else source or self.source
        begun = decoding(self.model, drafter, requests, *settings.how, keep_drafts=keep_drafts)
        return DecodingRun(begun, perf_counter() - start)

    def warm_up(self, prompt: Sequence[int], settings: Settings) -> None:
        """Decode a few tokens, with and without the drafter, so that the first answer is as fast as later answers."""
        for plain in [True] if self.source is None else [True, False]:
            list(islice(self.run(prompt, settings, plain=plain), WARM_UP_STEPS))
