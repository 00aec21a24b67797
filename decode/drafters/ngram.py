"""Prompt lookup: what followed the last words where they stood before (Saxena 2023; LLMA, arXiv 2304.04487).

No model and no training; good where text repeats itself or its prompt. The longest n-gram at the end of the text that
stood before is looked up in an index that grows with the text, and the tokens behind it are drafted: a chain, or with
several matches a trie. Where such a match runs into the end of the text it goes on with itself, as in Lempel and Ziv's
compression, so that a loop is predicted as far as one looks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from decode.draft import Draft, Drafter, DrafterConfig, DrafterContext, DrafterFactory, Frontier
from decode.drafters import require_at_least, require_no_tree
from decode.drafters.tries import Trie, draft_of
from decode.loop import Session
from decode.sequences import Sequences


@dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    """Prompt lookup."""

    n: int = 3
    """The longest n-gram that is looked up."""
    min_n: int = 1
    """The shortest one."""
    tokens: int = 10
    """Drafted behind a match, at most."""
    matches: int = 1
    """Places in the text that are followed: 1 gives a chain, more a trie, the longest and latest matches first."""
    nodes: int = 0
    """Of the trie at most, root included; 0: as many as there can be."""

    def __post_init__(self) -> None:
        require_at_least(1, "ngram", min_n=self.min_n, tokens=self.tokens, matches=self.matches)
        require_at_least(self.min_n, "ngram", n=self.n)
        require_at_least(0, "ngram", nodes=self.nodes)

    def source(self, materials: DrafterContext) -> DrafterFactory:
        require_no_tree(materials.tree, materials.stop_drafting)
        return PromptLookup(self)


class PromptLookup(DrafterFactory):
    """Starts n-gram drafters."""

    def __init__(self, plan: NgramConfig) -> None:
        self.plan = plan

    @property
    def num_nodes(self) -> int:
        return self.plan.nodes or 1 + self.plan.tokens * self.plan.matches

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return NgramDrafter(self.plan, session.sequences, self.num_nodes)


class Index:
    """Where the n-grams of a text stand, without the one that it ends in; it only ever reads new tokens."""

    def __init__(self, min_n: int, n: int) -> None:
        self.sizes = range(n, min_n - 1, -1)
        self.text: list[int] = []
        self.ends: dict[tuple[int, ...], list[int]] = defaultdict(list)  # n-gram -> the places right behind it
        self.read = 0  # n-grams that end here or before are in

    def extend(self, tokens: list[int]) -> None:
        """Put `tokens` behind the text."""
        self.text += tokens
        for end in range(self.read + 1, len(self.text)):
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(self.text[end - size : end])].append(end)
        self.read = max(self.read, len(self.text) - 1)

    def matches(self, most: int) -> Iterator[int]:
        """Up to `most` places at which the text goes on after what it ends in: longest n-grams first, then latest."""
        found: set[int] = set()
        for size in self.sizes:
            if size > len(self.text):
                continue
            for end in reversed(self.ends.get(tuple(self.text[-size:]), ())):
                if len(found) == most:
                    return
                if end not in found:
                    found.add(end)
                    yield end

    def behind(self, place: int, count: int) -> list[int]:
        """`count` tokens from `place` on; at the end of the text it goes on with what stands at `place`."""
        period = self.text[place:]
        return (period * (count // len(period) + 1))[:count] if len(period) < count else period[:count]


class NgramDrafter:
    """One index a row."""

    def __init__(self, plan: NgramConfig, sequences: Sequences, num_nodes: int) -> None:
        self.plan, self.sequences, self.num_nodes = plan, sequences, num_nodes
        self.rows: dict[int, Index] = {}

    def propose(self, frontier: Frontier) -> Draft:
        return draft_of([self._of_row(row) for row in frontier.rows], frontier.root)

    def _of_row(self, row: int) -> Trie:
        if row not in self.rows:
            self.rows[row] = Index(self.plan.min_n, self.plan.n)
        index, trie = self.rows[row], Trie(self.num_nodes)
        index.extend(self.sequences.tail(row, len(index.text)))
        # What the text has no room for is not drafted; the last token is decided on without being drafted.
        count = min(self.plan.tokens, self.sequences.room(row) - 1)
        for place in index.matches(self.plan.matches) if count > 0 else ():
            trie.add(index.behind(place, count))
        return trie
