"""Token ids as text: whole or piece by piece while it grows, up to the first stop string.

Stop strings are found in the bytes of tokens, special tokens included, as by transformers' `StopStringCriteria`. That
class makes tables of the whole vocabulary for each new set of strings, which takes a second for 49,000 tokens and five
for 262,000. A server gets its strings with the requests. So here, the bytes of a token are made when it comes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

INCOMPLETE = "\ufffd"  # tokenizers return this character for an incomplete or invalid UTF-8 character
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of one byte, in tokenizers that fall back on bytes
KEPT_BEFORE = 8  # ids of the earlier text with which new ids are decoded, since a token's text may depend on them
BEFORE = "abcdef"
"""A text before a token, because tokenizers drop the space of a text's first token."""


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that texts are shown without; `all_special_ids` are only those with a role, such as EOS."""
    return _special_ids(tokenizer, len(tokenizer))


@lru_cache(maxsize=8)  # Gemma has 6,249 of them
def _special_ids(tokenizer: PreTrainedTokenizerBase, size: int) -> frozenset[int]:
    added = {token for token, about in tokenizer.added_tokens_decoder.items() if about.special}
    return frozenset(added.union(tokenizer.all_special_ids))


class TokenBytes:
    """The bytes that each token adds to a text. Special tokens add their names, unlike in texts that are shown."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = b"" if decoder is None else decoder.__getstate__()
        self.has_byte_tokens, self.is_byte_level = b'"ByteFallback"' in state, b'"ByteLevel"' in state
        self.known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        if token not in self.known:
            self.known[token] = self._read(self.tokenizer.convert_ids_to_tokens([token])[0])
        return self.known[token]

    @cached_property
    def before(self) -> list[str]:
        """The tokens of a text before the token that is read."""
        ids = self.tokenizer(BEFORE, add_special_tokens=False)["input_ids"]
        return list(self.tokenizer.convert_ids_to_tokens(ids))

    @cached_property
    def byte_of(self) -> dict[str, int]:
        """The byte that each letter of a byte-level token stands for."""
        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    def _read(self, name: str | None) -> bytes:
        if name is None:  # models can have more ids than their tokenizers
            return b""
        if self.has_byte_tokens and len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        if self.is_byte_level and not self.has_byte_tokens and all(letter in self.byte_of for letter in name):
            return bytes(self.byte_of[letter] for letter in name)
        before, both = map(self.tokenizer.convert_tokens_to_string, (self.before, [*self.before, name]))
        return both.removeprefix(before).encode()


class StopStrings(StoppingCriteria):
    """A stopping criterion: ends a text with the token that completes a stop string.

    A string that begins in the prompt does not count, as in the OpenAI API; for `StopStringCriteria` it does."""

    def __init__(self, token_bytes: TokenBytes, strings: Sequence[str], start: int) -> None:
        """Look for `strings` in the tokens from the position `start` on, the length of the prompt."""
        self.token_bytes, self.start = token_bytes, start
        self.strings = [string.encode() for string in strings]
        self.window = max(map(len, self.strings))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object) -> torch.Tensor:
        start = max(self.start, input_ids.shape[1] - self.window)
        ended = [self._ends(ids) for ids in input_ids[:, start:].tolist()]
        return torch.tensor(ended, device=input_ids.device)

    def _ends(self, ids: list[int]) -> bool:
        """Whether the last of some tokens completes a string; it may contain more than the string's end."""
        parts = [self.token_bytes(token) for token in ids]
        text = b"".join(parts)
        before = len(text) - len(parts[-1]) if parts else 0
        return any(text.find(string, max(before - len(string) + 1, 0)) >= 0 for string in self.strings)


def before_stop(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]
) -> tuple[list[int], int]:
    """Find the tokens before the first stop string, and how many characters of their text it contains.

    The last of these tokens may contain both text and the beginning of the string. Without a string, all `ids` are
    returned."""
    parts = list(map(TokenBytes(tokenizer), ids)) if strings else []
    whole = b"".join(parts)
    starts = [start for string in strings if (start := whole.find(string.encode())) >= 0]
    if not starts:
        return list(ids), 0
    left, special = min(starts), special_ids(tokenizer)
    for place, part in enumerate(parts):
        if left < len(part):
            shared = left > 0 and ids[place] not in special
            return list(ids[: place + shared]), len(part[left:].decode(errors="replace")) if shared else 0
        left -= len(part)
    raise AssertionError("the string begins in one of the tokens")


def text_of(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str] | None = ()) -> str:
    """Decode token ids to text without special tokens, cut before the first stop string; empty without a tokenizer.

    A stop string may be a special token, or contain one."""
    if tokenizer is None:
        return ""
    kept, surplus = before_stop(ids, tokenizer, stop or ())
    text = str(tokenizer.decode(kept, skip_special_tokens=True))
    return text[: len(text) - surplus]


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
    waits until more text shows whether it is, and so do spaces that the tokenizer may remove. Without `before` and
    `keeps_special`, all pieces joined equal `text_of` of all ids."""

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
        start = max(len(before) - KEPT_BEFORE, 0)
        while start and (before[start] in self.hidden or self._is_byte(before[start])):
            start -= 1  # bytes are decoded together, so that no character is cut
        self.ids = list(before[start:])
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
        return last is not None and self._is_byte(last)

    def _is_byte(self, token: int) -> bool:
        return BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token))) is not None

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
        if self.stop and self.hidden.issuperset(self.ids[: self.done]):  # no text before
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
