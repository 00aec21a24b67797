"""Retrieval-based drafting: drafts are what follows the text's last tokens in a datastore (REST, arXiv 2311.08252).

Each step looks up the longest suffix of the text that occurs in the datastore. The tokens after its occurrences form a
trie, whose most frequent nodes are drafted (section 3.2). No draft model is needed, only a datastore of similar text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from transformers import PretrainedConfig

from decode.drafters.base import (
    DrafterConfig,
    DrafterContext,
    DrafterFactory,
    require_at_least,
    require_draftable_nodes,
)
from decode.drafters.retrieval.datastore import Datastore
from decode.drafters.retrieval.suffix_array import DEPTH
from decode.drafters.tries import TextDrafter, TextDrafterFactory, Trie
from medusa.errors import RequestError


@dataclass(frozen=True)
class RestConfig(DrafterConfig):
    """Options of `--drafter rest` (retrieval from a datastore)."""

    datastore: str  # a folder made by `medusa datastore build`
    nodes: int = 16  # maximum number of nodes of a draft, root included
    tokens: int = 6  # maximum number of tokens to draft after an occurrence
    n: int = DEPTH  # length of the longest suffix of the text to look up, in tokens
    min_n: int = 2  # length of the shortest suffix of the text to look up, in tokens
    matches: int = 100  # maximum number of occurrences to draft from; if there are more, evenly spaced ones are taken

    first = "datastore"
    needs = "a datastore"

    def __post_init__(self) -> None:
        if not self.datastore:
            raise RequestError("drafter rest needs a datastore: rest:DIR, made by `medusa datastore build`")
        require_at_least(1, "rest", tokens=self.tokens, min_n=self.min_n, matches=self.matches)
        require_at_least(2, "rest", nodes=self.nodes)
        require_draftable_nodes("rest", self.nodes)
        require_at_least(self.min_n, "rest", n=self.n)
        if self.n > DEPTH:
            raise RequestError(
                f"drafter rest: n is {self.n}; a datastore is sorted by {DEPTH} tokens; give at most {DEPTH}"
            )

    @cached_property
    def opened(self) -> Datastore:
        """The datastore, opened at first use."""
        return Datastore(self.datastore)

    def check(self, config: PretrainedConfig) -> None:
        vocab_size = config.get_text_config(decoder=True).vocab_size
        self.opened.require_vocabulary(vocab_size, config.name_or_path or "the backbone")

    def factory(self, context: DrafterContext) -> DrafterFactory:
        self.opened.require_tokenizer(context.tokenizer, context.name)
        self.opened.require_vocabulary(context.model.config.get_text_config(decoder=True).vocab_size, context.name)
        # The files are mapped into memory; a lookup reads only a few of their pages.
        mapped = self.opened.tokens.nbytes + self.opened.order.nbytes
        return TextDrafterFactory(self.nodes, lambda session: RestDrafter(session.sequences, self), mapped)


@dataclass(eq=False)
class RestDrafter(TextDrafter):
    """A drafter that, in every step, looks up the end of each text of the batch in the datastore."""

    config: RestConfig

    def trie(self, row: int) -> Trie:
        count = self.depth(row, self.config.tokens)
        if count < 1:
            return Trie(1)
        end = self.sequences.tail(row, max(0, self.sequences.lengths[row] - self.config.n))
        return looked_up(self.config, end, count)


def looked_up(config: RestConfig, text: list[int], count: int) -> Trie:
    """Look up the longest suffix of `text` in the datastore; returns a trie of the next `count` tokens."""
    match = config.opened.longest(text[-config.n :], config.min_n)
    return most_frequent(config.opened.after(match, count, config.matches) if match else (), config.nodes)


def most_frequent(continuations: Iterable[list[int]], num_nodes: int) -> Trie:
    """Make a trie of `num_nodes` nodes, root included, from the most frequent prefixes of `continuations`.

    Of equally frequent prefixes, shorter ones come first, then those seen earlier. So parents come before children."""
    counts: Counter[tuple[int, ...]] = Counter()
    for line, times in Counter(map(tuple, continuations)).items():
        for depth in range(1, len(line) + 1):
            counts[line[:depth]] += times
    trie = Trie(num_nodes)
    for line in sorted(counts, key=lambda line: (-counts[line], len(line)))[: num_nodes - 1]:
        trie.add(line)
    return trie
