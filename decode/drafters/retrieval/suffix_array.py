"""A suffix array cut off at DEPTH tokens: all places of a text, sorted by the DEPTH tokens from there on.

Memory is bounded. Places are taken in groups whose first tokens are neighbours. A group of at most GROUP places is
sorted at once, by keys of as many tokens as 64 bits hold, with 60 to 80 bytes per place. A larger one, such as the
spaces of source code, is first split by its next token, with 11 bytes per place: 130 MB for 12 M places.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

DEPTH = 16
"""Tokens by which suffixes are sorted, and so the longest match that can be found; REST also takes 16."""
GROUP = 2**20
"""The most places sorted at once."""
BLOCK = 2**22
"""Tokens searched at once."""


def first_groups(tokens: NDArray, end: int, size: int | None = None) -> list[tuple[int, int]]:
    """Ranges of first tokens [low, high) that hold at most `size` places each (GROUP), or are a single token.

    tokens [n + DEPTH] with ids below `end`; `end` itself separates documents and follows the last one, DEPTH times.
    """
    return _groups(_counts(tokens[: len(tokens) - DEPTH], end + 1)[:end], size or GROUP)


def sorted_places(tokens: NDArray, low: int, high: int, end: int, size: int | None = None) -> Iterator[NDArray]:
    """The places [uint32] whose token is in [low, high), sorted by their suffixes, then by place."""
    size, bits = size or GROUP, end.bit_length()
    stack = [(_places(tokens, low, high), int(high - low == 1))]
    while stack:
        places, depth = stack.pop()
        if depth == DEPTH:
            yield places
        elif len(places) <= size:
            yield _sorted(tokens, places, depth, bits)
        else:
            following = np.empty(len(places), tokens.dtype)
            for start in range(0, len(places), BLOCK):  # in blocks, as an index takes 8 bytes per place
                at = places[start : start + BLOCK].astype(np.int64)
                following[start : start + BLOCK] = tokens[at + depth]
            parts = [
                (places[(following >= low) & (following < high)], depth + int(high - low == 1))
                for low, high in _groups(_counts(following, end + 1), size)
            ]
            stack += parts[::-1]
            del places, following, parts


def _places(tokens: NDArray, low: int, high: int) -> NDArray:
    found = []
    for start in range(0, len(tokens) - DEPTH, BLOCK):
        block = tokens[start : min(start + BLOCK, len(tokens) - DEPTH)]
        found.append((np.flatnonzero((block >= low) & (block < high)) + start).astype(np.uint32))
    return np.concatenate(found)


def _counts(tokens: NDArray, vocab_size: int) -> NDArray:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(tokens), BLOCK):
        counts += np.bincount(tokens[start : start + BLOCK], minlength=vocab_size)
    return counts


def _groups(counts: NDArray, size: int) -> list[tuple[int, int]]:
    """Join neighbouring tokens into ranges that hold at most `size` places, given the places of each token [V]."""
    groups: list[tuple[int, int]] = []
    held = 0
    for token in np.flatnonzero(counts).tolist():
        count = int(counts[token])
        if groups and held + count <= size:
            groups[-1], held = (groups[-1][0], token + 1), held + count
        else:
            groups.append((token, token + 1))
            held = count
    return groups


def _sorted(tokens: NDArray, places: NDArray, depth: int, bits: int) -> NDArray:
    """Sort places by their tokens from `depth` to DEPTH, each token in `bits` bits of a key."""
    at, keys = places.astype(np.int64), []
    for start in range(depth, DEPTH, 64 // bits):
        key = np.zeros(len(places), np.uint64)
        for offset in range(start, min(start + 64 // bits, DEPTH)):
            key <<= np.uint64(bits)
            key |= tokens[at + offset]
        keys.append(key)
    return places[np.lexsort(keys[::-1])]
