"""Suffix arrays made in bounded memory: all positions of a text, sorted by the DEPTH tokens from each position on.

A group holds all positions at which the token's id is in one range, and groups are sorted one by one. A group of at
most GROUP positions is sorted at once, by 64-bit keys of several tokens, in 60 to 80 bytes of memory per position. A
larger group, such as all spaces of source code, is first split by the token after each position, in 11 bytes each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

DEPTH = 16  # tokens by which suffixes are sorted, and so the longest match that a search finds; 16 as in REST
GROUP = 2**20  # maximum number of positions that are sorted at once
BLOCK = 2**22  # number of tokens that are read at once


def first_groups(tokens: NDArray, end: int, size: int | None = None) -> list[tuple[int, int]]:
    """Split the vocabulary into id ranges [low, high) with at most `size` occurrences each, or one more frequent id.

    `size` is GROUP by default. `tokens` [n + DEPTH] are the n ids of a text, padded with DEPTH copies of `end`, the
    greatest id, which also ends each document."""
    return _groups(_counts(tokens[: len(tokens) - DEPTH], end + 1)[:end], size or GROUP)


def sorted_places(tokens: NDArray, low: int, high: int, end: int, size: int | None = None) -> Iterator[NDArray]:
    """Yield, in consecutive arrays, all positions of ids in [low, high), sorted by the DEPTH tokens from there on."""
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
            for start in range(0, len(places), BLOCK):  # in blocks, as an index takes 8 bytes per position
                at = places[start : start + BLOCK].astype(np.int64)
                following[start : start + BLOCK] = tokens[at + depth]
            for low, high in reversed(_groups(_counts(following, end + 1), size)):
                stack.append((places[(following >= low) & (following < high)], depth + int(high - low == 1)))
            del places, following


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
    """Join neighbouring ids into ranges of at most `size` positions. `counts` [V]: number of positions of each id."""
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
    """Sort positions of the text `tokens` by the tokens that follow each, at offsets `depth` to DEPTH - 1.

    A token takes `bits` bits of a 64-bit sort key."""
    at, keys = places.astype(np.int64), []
    for start in range(depth, DEPTH, 64 // bits):
        key = np.zeros(len(places), np.uint64)
        for offset in range(start, min(start + 64 // bits, DEPTH)):
            key <<= np.uint64(bits)
            key |= tokens[at + offset]
        keys.append(key)
    return places[np.lexsort(keys[::-1])]
