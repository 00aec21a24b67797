"""Prompt lookup decoding (Saxena 2023; LLMA, arXiv 2304.04487): drafts copy what followed the same n-gram earlier.

An index finds earlier occurrences of the n-grams at the end of the text, the longest n-gram first. The tokens after an
occurrence are drafted: a chain for one occurrence, a trie for several. If the drafted tokens reach the end of the text,
they repeat, as in Lempel-Ziv compression, so that a text that repeats itself is predicted to any length.

The more tokens match before a copied token, the more often it is right (`RELIABILITY`). From that follows how probable
each path is, so that a mix can compare it with the guesses of heads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from decode.drafters.base import (
    DrafterConfig,
    DrafterContext,
    DrafterFactory,
    require_at_least,
    require_draftable_nodes,
)
from decode.drafters.tries import TextDrafter, TextDrafterFactory, Trie


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    """Options of `--drafter ngram` (prompt lookup decoding)."""

    n: int = 3  # length of the longest n-gram to look up, in tokens
    min_n: int = 1  # length of the shortest n-gram to look up, in tokens
    tokens: int = 10  # maximum number of tokens to draft after an earlier occurrence
    matches: int = 1  # maximum occurrences to draft from (1: a chain); longer n-grams first, then later occurrences
    nodes: int = 0  # maximum number of nodes of the trie, root included; 0: no limit

    def __post_init__(self) -> None:
        require_at_least(1, "ngram", min_n=self.min_n, tokens=self.tokens, matches=self.matches)
        require_at_least(self.min_n, "ngram", n=self.n)
        require_at_least(0, "ngram", nodes=self.nodes)
        require_draftable_nodes("ngram", self.num_nodes)

    @property
    def num_nodes(self) -> int:
        """Maximum number of nodes of a draft, root included."""
        return self.nodes or 1 + self.tokens * self.matches

    def factory(self, context: DrafterContext) -> DrafterFactory:
        return TextDrafterFactory(self.num_nodes, lambda session: NgramDrafter(session.sequences, self))


RELIABILITY = (0.26, 0.53, 0.67, 0.71, 0.74, 0.76, 0.76, 0.91)
"""How often a copied token is right if 1, 2, ..., 8 or more tokens before it match.

Counted in 7,110 tokens of SmolLM2-135M-Instruct (20 prompts each of GSM8K, MT-bench and HumanEval). Counts of the text
that is being decoded did not improve the choice of nodes (docs/log.md)."""


class NgramIndex:
    """An index of a growing text, which maps each n-gram to the positions of the tokens that followed it."""

    def __init__(self, min_n: int, n: int) -> None:
        self.sizes = range(n, min_n - 1, -1)
        self.text: list[int] = []
        self.drafted = Trie(1)  # the last draft
        self.matching = 0  # tokens at the end of the text that match before the best copy; 0: nothing to copy
        self.missed: tuple[int, int] | None = None
        """Of the last draft, `matching`, and the accepted tokens that it did not hold; `None`: unknown."""
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: list[int]) -> None:
        """Append `tokens` to the text, and index the n-grams that end just before each of these tokens."""
        accepted = len(tokens) - 1  # the last token follows the accepted ones
        self.missed = (self.matching, max(accepted - self.drafted.follow(tokens), 0)) if self.text and tokens else None
        first = max(len(self.text), 1)
        self.text += tokens
        for end in range(first, len(self.text)):
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(self.text[end - size : end])].append(end)

    def match(self, position: int) -> int:
        """Count the tokens before `position` that equal the end of the text, at most as many as `RELIABILITY` has."""
        length, most = 1, min(len(RELIABILITY), position)
        while length < most and self.text[position - 1 - length] == self.text[-1 - length]:
            length += 1
        return length

    def log_probs(self, matching: int, count: int) -> list[float]:
        """Estimate the log probability of each path to `count` copied tokens, before which `matching` tokens match."""
        levels = (min(matching + depth, len(RELIABILITY)) for depth in range(count))
        return list(accumulate(math.log(RELIABILITY[level - 1]) for level in levels))

    def matches(self, most: int) -> Iterator[int]:
        """Yield positions that follow earlier copies of the text's last n tokens: at most `most`, greatest n first."""
        found: set[int] = set()
        for size in self.sizes:
            for end in reversed(self.ends.get(tuple(self.text[-size:]), ())):
                if len(found) == most:
                    return
                if end not in found:
                    found.add(end)
                    yield end

    def after(self, position: int, count: int) -> list[int]:
        """Return `count` tokens of the text from `position` on; if it has fewer, they are repeated in a cycle."""
        period = self.text[position:]
        return (period * (count // len(period) + 1))[:count] if len(period) < count else period[:count]


@dataclass(eq=False)
class NgramDrafter(TextDrafter):
    """Drafts by prompt lookup, with one n-gram index per text."""

    rated = True
    config: NgramConfig

    def trie(self, row: int) -> Trie:
        index: NgramIndex = self.rows.setdefault(row, NgramIndex(self.config.min_n, self.config.n))
        trie = Trie(self.config.num_nodes)
        index.extend(self.sequences.tail(row, len(index.text)))
        count = self.depth(row, self.config.tokens)
        index.drafted, index.matching = trie, 0
        others = 0.0  # the log probability that the better matches are wrong
        for position in index.matches(self.config.matches) if count > 0 else ():
            matching = index.match(position)
            index.matching = index.matching or matching
            log_probs = index.log_probs(matching, count)
            trie.add(index.after(position, count), [others + log_prob for log_prob in log_probs])
            others += math.log1p(-math.exp(log_probs[0]))
        return trie
