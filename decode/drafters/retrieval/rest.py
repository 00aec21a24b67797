"""Retrieval: what followed the text's last words in a datastore of other texts (REST, arXiv 2311.08252).

The longest end of the text that stands in the datastore is looked up; what followed it in all those places is merged
into a trie with counts, and its most frequent nodes are drafted (section 3.2). No model and no training, but text like
the one to come: code for code, the backbone's own answers for its answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from transformers import PretrainedConfig

from decode.draft import Draft, Drafter, Frontier
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least, require_no_tree
from decode.drafters.retrieval.datastore import Datastore
from decode.drafters.retrieval.suffix_array import DEPTH
from decode.drafters.tries import Trie, draft_of
from decode.sequences import Sequences
from decode.session import Session
from medusa.errors import RequestError


@dataclass(frozen=True)
class RestConfig(DrafterConfig):
    """Retrieval from a datastore."""

    datastore: str
    """A folder that `medusa datastore build` made."""
    nodes: int = 16
    """Drafted at most, root included."""
    tokens: int = 6
    """Drafted behind a match, at most."""
    n: int = DEPTH
    """The longest end of the text that is looked up."""
    min_n: int = 2
    """The shortest one."""
    matches: int = 100
    """Places of it whose continuations are counted; of more, an even choice."""

    first = "datastore"
    needs = "a datastore"

    def __post_init__(self) -> None:
        if not self.datastore:
            raise RequestError("drafter rest needs a datastore: rest:DIR, made by `medusa datastore build`")
        require_at_least(1, "rest", tokens=self.tokens, min_n=self.min_n, matches=self.matches)
        require_at_least(2, "rest", nodes=self.nodes)
        require_at_least(self.min_n, "rest", n=self.n)
        if self.n > DEPTH:
            raise RequestError(f"drafter rest: n is {self.n}; a datastore is sorted by {DEPTH} tokens, so at most that")

    @cached_property
    def opened(self) -> Datastore:
        return Datastore(self.datastore)

    def check(self, config: PretrainedConfig) -> None:
        text = config.get_text_config(decoder=True)
        self.opened.require_vocabulary(text.vocab_size, config.name_or_path or "the backbone")

    def factory(self, context: DrafterContext) -> DrafterFactory:
        require_no_tree(context.tree, context.stop_drafting)
        self.opened.require_tokenizer(context.tokenizer, context.name)
        self.opened.require_vocabulary(context.model.config.get_text_config(decoder=True).vocab_size, context.name)
        return Retrieval(self)


class Retrieval(DrafterFactory):
    """Starts drafters over an open datastore."""

    def __init__(self, plan: RestConfig) -> None:
        self.plan = plan

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes

    @property
    def num_bytes(self) -> int:
        """On disk, mapped into memory; of that a text's lookups read a few pages."""
        return self.plan.opened.tokens.nbytes + self.plan.opened.order.nbytes

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return RestDrafter(self.plan, session.sequences)


class RestDrafter:
    """Looks the end of every row up anew: nothing is kept between steps."""

    def __init__(self, plan: RestConfig, sequences: Sequences) -> None:
        self.plan, self.sequences = plan, sequences

    def propose(self, frontier: Frontier) -> Draft:
        return draft_of([self._of_row(row) for row in frontier.rows], frontier.root)

    def _of_row(self, row: int) -> Trie:
        # What the text has no room for is not drafted; the last token is decided on without being drafted.
        count = min(self.plan.tokens, self.sequences.room(row) - 1)
        if count < 1:
            return Trie(1)
        end = self.sequences.tail(row, max(0, self.sequences.lengths[row] - self.plan.n))
        return looked_up(self.plan, end, count)


def looked_up(plan: RestConfig, text: list[int], count: int) -> Trie:
    """What the datastore drafts behind the end of `text`, `count` tokens deep."""
    match = plan.opened.longest(text[-plan.n :], plan.min_n)
    return most_frequent(plan.opened.behind(match, count, plan.matches) if match else (), plan.nodes)


def most_frequent(continuations: Iterable[list[int]], num_nodes: int) -> Trie:
    """The `num_nodes` most frequent nodes of a trie, root included; of as frequent ones the shallower, then the first.

    A node is as frequent as its children together, at least, so that the parents of all of them are among them.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for line, times in Counter(map(tuple, continuations)).items():
        for depth in range(1, len(line) + 1):
            counts[line[:depth]] += times
    trie = Trie(num_nodes)
    for line in sorted(counts, key=lambda line: (-counts[line], len(line)))[: num_nodes - 1]:
        trie.add(line)
    return trie
