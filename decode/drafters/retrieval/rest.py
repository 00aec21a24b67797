"""Retrieval: what followed the text's last tokens in a datastore of other texts (REST, arXiv 2311.08252).

The longest end of the text that the datastore contains is looked up. What follows its occurrences is merged into a
trie, whose most frequent nodes are drafted (section 3.2). No model is needed, but a datastore of similar text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from transformers import PretrainedConfig

from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, TextDrafterFactory, require_at_least
from decode.drafters.retrieval.datastore import Datastore
from decode.drafters.retrieval.suffix_array import DEPTH
from decode.drafters.tries import TextDrafter, Trie
from medusa.errors import RequestError


@dataclass(frozen=True)
class RestConfig(DrafterConfig):
    """Options of retrieval from a datastore."""

    datastore: str
    """A folder made by `medusa datastore build`."""
    nodes: int = 16
    """The most nodes of a draft, root included."""
    tokens: int = 6
    """The most tokens to draft after a match."""
    n: int = DEPTH
    """Tokens of the longest end of the text to look up."""
    min_n: int = 2
    """Tokens of the shortest end to look up."""
    matches: int = 100
    """The most occurrences whose continuations are counted, spread evenly over all occurrences."""

    first = "datastore"
    needs = "a datastore"

    def __post_init__(self) -> None:
        if not self.datastore:
            raise RequestError("drafter rest needs a datastore: rest:DIR, made by `medusa datastore build`")
        require_at_least(1, "rest", tokens=self.tokens, min_n=self.min_n, matches=self.matches)
        require_at_least(2, "rest", nodes=self.nodes)
        require_at_least(self.min_n, "rest", n=self.n)
        if self.n > DEPTH:
            raise RequestError(
                f"drafter rest: n is {self.n}; a datastore is sorted by {DEPTH} tokens; give at most {DEPTH}"
            )

    @cached_property
    def opened(self) -> Datastore:
        return Datastore(self.datastore)

    def check(self, config: PretrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        self.opened.require_vocabulary(text.vocab_size, config.name_or_path or "the backbone")

    def factory(self, context: DrafterContext) -> DrafterFactory:
        self.opened.require_tokenizer(context.tokenizer, context.name)
        self.opened.require_vocabulary(context.model.config.get_text_config(decoder=True).vocab_size, context.name)
        # The files are mapped into memory; a lookup reads only a few of their pages.
        mapped = self.opened.tokens.nbytes + self.opened.order.nbytes
        return TextDrafterFactory(self.nodes, lambda session: RestDrafter(session.sequences, self), mapped)


@dataclass(eq=False)
class RestDrafter(TextDrafter):
    """Looks up the end of every row in each step; nothing is kept between steps."""

    config: RestConfig

    def trie(self, row: int) -> Trie:
        count = self.depth(row, self.config.tokens)
        if count < 1:
            return Trie(1)
        end = self.sequences.tail(row, max(0, self.sequences.lengths[row] - self.config.n))
        return looked_up(self.config, end, count)


def looked_up(config: RestConfig, text: list[int], count: int) -> Trie:
    """The trie, `count` tokens deep, of what the datastore holds after the end of `text`."""
    match = config.opened.longest(text[-config.n :], config.min_n)
    return most_frequent(config.opened.after(match, count, config.matches) if match else (), config.nodes)


def most_frequent(continuations: Iterable[list[int]], num_nodes: int) -> Trie:
    """The `num_nodes` most frequent nodes of a trie, root included; ties go to the shallower node, then to the first.

    A node is at least as frequent as its children together, so the parents of the chosen nodes are chosen too.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for line, times in Counter(map(tuple, continuations)).items():
        for depth in range(1, len(line) + 1):
            counts[line[:depth]] += times
    trie = Trie(num_nodes)
    for line in sorted(counts, key=lambda line: (-counts[line], len(line)))[: num_nodes - 1]:
        trie.add(line)
    return trie
