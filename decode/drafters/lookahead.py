"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): the backbone's own guesses about its future, kept as n-grams.

A window of made-up tokens, `window` columns wide and `n` - 1 levels deep, stands under the root and is read in the
forward that verifies the draft (their section 4.1: lookahead and verification branch). Level 0 is a line that begins
with the root; from each of its tokens hangs a column of the levels below, which came out of one step each:

    level 0   root ─ a1 ─ a2      the backbone answers behind c0, c1, c2 with d0, d1, d2
               │     │    │
    level 1    b0    b1   b2      into the pool: root b0 c0 d0, a1 b1 c1 d1, a2 b2 c2 d2
               │     │    │
    level 2    c0    c1   c2      the next window: levels b, c, d, and in b0's place the next root

That is a step of Jacobi iteration for every column. Of the pool, the n-grams that begin with the root are drafted, as
a trie; of the window nothing is ever accepted.

Shapes: B rows, W columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decode.draft import Draft, Drafter, Frontier, SideBranch
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least, require_no_tree
from decode.drafters.tries import Trie, draft_of
from decode.ops.fast_topk import argmax
from decode.sequences import Sequences
from decode.session import Session
from decode.topology import Topology


@dataclass(frozen=True)
class LookaheadConfig(DrafterConfig):
    """Lookahead decoding."""

    window: int = 10
    """Columns: how many n-grams a step makes, and how far ahead of the text they begin."""
    n: int = 4
    """Tokens of an n-gram, of which the first is the text's last and the others are drafted."""
    guesses: int = 10
    """N-grams kept for each first token, and drafted, at most: the latest ones."""

    def __post_init__(self) -> None:
        require_at_least(1, "lookahead", window=self.window, guesses=self.guesses)
        require_at_least(3, "lookahead", n=self.n)  # with 2, the first column holds nothing but the root

    def factory(self, context: DrafterContext) -> DrafterFactory:
        require_no_tree(context.tree, context.stop_drafting)
        return Lookahead(self)


class Lookahead(DrafterFactory):
    """Starts lookahead drafters."""

    warm_up = 16

    def __init__(self, plan: LookaheadConfig) -> None:
        self.plan = plan

    @property
    def num_nodes(self) -> int:
        """All guesses, and the window, which holds the root as well."""
        return (self.plan.guesses + self.plan.window) * (self.plan.n - 1)

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return LookaheadDrafter(self.plan, session.sequences, session.backbone.device)


def window_topology(window: int, levels: int, device: torch.device) -> Topology:
    """The root and the window under it, level by level, for all rows and steps."""
    line, node = torch.arange(window), torch.arange(window * levels)
    column, level = node % window, node // window
    parent = torch.where(level == 0, (line - 1).clamp_min(0).repeat(levels), node - window)
    depth, deepest = (column + level).to(device), window + levels - 2
    return Topology.from_parents(parent[None].to(device), depth[None], deepest, 2)


class Pool:
    """N-grams by their first token, the latest ones of each."""

    def __init__(self, most: int) -> None:
        """`most`: behind each first token."""
        self.most = most
        self.behind: dict[int, dict[tuple[int, ...], None]] = {}  # a dict for its order: first in, first out

    def add(self, ngram: Sequence[int]) -> None:
        """Of an n-gram that is known already, remember that it came again."""
        held, rest = self.behind.setdefault(ngram[0], {}), tuple(ngram[1:])
        held.pop(rest, None)
        held[rest] = None
        if len(held) > self.most:
            del held[next(iter(held))]

    def guesses(self, token: int) -> Iterator[tuple[int, ...]]:
        """What stood behind `token`, the latest first."""
        return reversed(self.behind.get(token, {}))


class Window:
    """The made-up tokens of a row, and the pool that they fill."""

    def __init__(self, plan: LookaheadConfig, text: list[int]) -> None:
        """At first each column holds a passage of the text: something that could be said, and the same words under
        another vocabulary."""
        levels, columns = range(plan.n - 1), range(plan.window)
        starts = [column * len(text) // plan.window for column in columns]
        self.levels = [[text[(start + level) % len(text)] for start in starts] for level in levels]
        self.pool = Pool(plan.guesses)
        self.length = 0
        """Of the text, when these tokens were last read."""

    def tokens(self, root: int, length: int) -> list[int]:
        """All of them without the root, which now ends a text of `length` tokens."""
        self.levels[0][0], self.length = root, length
        return [token for level in self.levels for token in level][1:]

    def learn(self, answers: list[int]) -> None:
        """What the backbone said behind each column: n-grams for the pool, and a new last level.

        Columns move on by one place, however many tokens the step wrote: to keep them where they stood, and begin new
        ones for those that the text has passed, accepts no more (docs/log.md)."""
        for ngram in zip(*self.levels, answers, strict=True):
            self.pool.add(ngram)
        self.levels = [*self.levels[1:], answers]


class LookaheadDrafter:
    """One window and pool a row."""

    def __init__(self, plan: LookaheadConfig, sequences: Sequences, device: torch.device) -> None:
        self.plan, self.sequences = plan, sequences
        self.topology = window_topology(plan.window, plan.n - 1, device)
        self.rows: dict[int, Window] = {}
        self.told: tuple[list[int], Tensor] | None = None
        """Rows, and what the backbone said behind their columns [B, W]; still on its device, as nobody has asked."""

    def propose(self, frontier: Frontier) -> Draft:
        self._learn()
        draft = draft_of([self._guesses(row) for row in frontier.rows], frontier.root)
        if max(map(self.sequences.room, frontier.rows)) < 3:
            return draft  # n-grams come too late: what the next step writes is decided on without being drafted
        tokens = [self.rows[row].tokens(self._root(row), self.sequences.lengths[row]) for row in frontier.rows]
        ids = torch.tensor(tokens, device=frontier.root.device)
        return draft._replace(side_branches=(SideBranch(ids, self.topology, partial(self._hear, frontier.rows)),))

    def _root(self, row: int) -> int:
        return self.sequences.tail(row, self.sequences.lengths[row] - 1)[0]

    def _guesses(self, row: int) -> Trie:
        if row not in self.rows:
            self.rows[row] = Window(self.plan, self.sequences.tail(row, 0))
        # What the text has no room for is not drafted; the last token is decided on without being drafted.
        count = min(self.plan.n, self.sequences.room(row)) - 1
        trie = Trie(1 + self.plan.guesses * (self.plan.n - 1))
        for guess in self.rows[row].pool.guesses(self._root(row)):
            trie.add(guess[:count])
        return trie

    def _hear(self, rows: list[int], logits: Tensor) -> None:
        """logits [B, M, V] behind the tokens of the windows; the last level's count."""
        self.told = rows, argmax(logits[:, -self.plan.window :])

    def _learn(self) -> None:
        if self.told is None:
            return
        for row, answers in zip(self.told[0], self.told[1].tolist(), strict=True):
            # Whoever asks again without having written gets the same answer.
            if self.sequences.lengths[row] > self.rows[row].length:
                self.rows[row].learn(answers)
        self.told = None
