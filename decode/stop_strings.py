"""Stop strings, found in the bytes of tokens as transformers' `StopStringCriteria` finds them, special tokens included.

That class makes tables of the whole vocabulary for each new set of strings, which takes a second for 49,000 tokens and
five for 262,000. A server gets its strings with the requests. So here, the bytes of a token are made when it comes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.convert_slow_tokenizer import bytes_to_unicode

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
