"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): drafts are n-grams that the backbone predicted earlier.

A window of guessed tokens, `window` columns wide and `n` - 1 levels deep, hangs below the root. The forward that
verifies the draft also reads the window (section 4.1). Level 0 is a line that starts with the root. Each of its tokens
starts a column; each lower level holds the backbone's predictions of one earlier step:

    level 0   root ─ a1 ─ a2      the backbone predicts d0, d1, d2 after c0, c1, c2
               │     │    │
    level 1    b0    b1   b2      new n-grams: root b0 c0 d0, a1 b1 c1 d1, a2 b2 c2 d2
               │     │    │
    level 2    c0    c1   c2      the next window: levels b, c, d, with the next root instead of b0

So every column takes one step of Jacobi iteration. The new n-grams go into a pool. The pool's n-grams that start with
the root are drafted as a trie. Tokens of the window itself are never accepted.

Shapes: B texts, W columns, M nodes of the window without its root, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from decode.draft import Draft, Frontier, SideBranch
from decode.drafters.base import (
    DrafterConfig,
    DrafterContext,
    DrafterFactory,
    require_at_least,
    require_draftable_nodes,
)
from decode.drafters.tries import TextDrafter, TextDrafterFactory, Trie
from decode.ops.transfer import on_device
from decode.sequences import Sequences
from decode.topology import Topology
from medusa.argmax import argmax


@dataclass(frozen=True)
class LookaheadConfig(DrafterConfig):
    """Options of `--drafter lookahead` (lookahead decoding)."""

    window: int = 10  # number of columns of the window; each column gives one n-gram per step
    n: int = 4  # number of tokens of an n-gram: the last token of the text, and `n` - 1 tokens to draft
    guesses: int = 10  # maximum number of n-grams to keep for each first token, and to draft; the latest ones are kept

    def __post_init__(self) -> None:
        require_at_least(1, "lookahead", window=self.window, guesses=self.guesses)
        require_at_least(3, "lookahead", n=self.n)  # with 2, the first column would hold the root alone
        require_draftable_nodes("lookahead", self.num_nodes)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a draft: those of all guesses, and the window with the root."""
        return (self.guesses + self.window) * (self.n - 1)

    def factory(self, context: DrafterContext) -> DrafterFactory:
        return TextDrafterFactory(
            num_nodes=self.num_nodes,
            make=lambda session: LookaheadDrafter(session.sequences, self, session.backbone.device),
            warm_up=16,
        )


def window_topology(window: int, levels: int, device: torch.device) -> Topology:
    """Make the topology of a lookahead window, which all texts share: a tree of `window` columns in `levels` levels."""
    line, node = torch.arange(window), torch.arange(window * levels)
    column, level = node % window, node // window
    parent = torch.where(level == 0, (line - 1).clamp_min(0).repeat(levels), node - window)
    depth, deepest = (column + level).to(device), window + levels - 2
    return Topology.from_parents(parent[None].to(device), depth[None], deepest, 2)


class Pool:
    """A store of n-grams. For each first token, the store keeps only the latest n-grams, at most `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.after: dict[int, dict[tuple[int, ...], None]] = {}  # inner dicts serve as ordered sets, oldest first

    def add(self, ngram: Sequence[int]) -> None:
        """Store an n-gram under its first token, as the newest."""
        held, rest = self.after.setdefault(ngram[0], {}), tuple(ngram[1:])
        held.pop(rest, None)
        held[rest] = None
        if len(held) > self.most:
            del held[next(iter(held))]

    def guesses(self, token: int) -> Iterator[tuple[int, ...]]:
        """Yield the tokens after `token` in each n-gram that starts with `token`, latest n-gram first."""
        return reversed(self.after.get(token, {}))


class Window:
    """The window of guessed tokens for one text of the batch, and the pool of the n-grams that the window produced."""

    def __init__(self, config: LookaheadConfig, text: list[int]) -> None:
        """Make a window whose columns are passages of the prompt `text`, as better first guesses than random tokens."""
        starts = [column * len(text) // config.window for column in range(config.window)]
        self.levels = [[text[(start + level) % len(text)] for start in starts] for level in range(config.n - 1)]
        self.pool = Pool(config.guesses)
        self.length = 0  # of the text when the backbone last read the window

    def tokens(self, root: int, length: int) -> list[int]:
        """Set the window's first token to `root`, store the text's `length`; returns the window's other tokens."""
        self.levels[0][0], self.length = root, length
        return [token for level in self.levels for token in level][1:]

    def learn(self, answers: list[int]) -> None:
        """Add an n-gram per column to the pool, drop the window's first level, and append `answers` as the last level.

        `answers` are the backbone's predictions after each column's last token. A column so moves on by one position
        per step. Moving it by the number of accepted tokens instead did not improve acceptance (docs/log.md)."""
        for ngram in zip(*self.levels, answers, strict=True):
            self.pool.add(ngram)
        self.levels = [*self.levels[1:], answers]


class LookaheadDrafter(TextDrafter):
    """Drafts n-grams by lookahead decoding, with one window of guessed tokens and one pool of n-grams per text."""

    def __init__(self, sequences: Sequences, config: LookaheadConfig, device: torch.device) -> None:
        super().__init__(sequences)
        self.config = config
        self.topology = window_topology(config.window, config.n - 1, device)
        # Rows of the last step, and the backbone's predictions after their columns [B, W], kept on the device.
        self.answers: tuple[list[int], Tensor] | None = None

    def propose(self, frontier: Frontier) -> Draft:
        """Draft the n-grams that continue each text, from the text's pool of n-grams.

        The draft also holds each text's lookahead window as a side branch, whose predictions give new n-grams."""
        if self.answers is not None:
            for row, answers in zip(self.answers[0], self.answers[1].tolist(), strict=True):
                # Rows without new text learn nothing, so that a second call gives the same draft.
                if row in self.rows and self.sequences.lengths[row] > self.rows[row].length:
                    self.rows[row].learn(answers)
            self.answers = None
        draft = super().propose(frontier)
        if max(map(self.sequences.tokens_left, frontier.rows)) < 3:
            return draft  # no later step could use n-grams of this window
        tokens = [self.rows[row].tokens(self._root(row), self.sequences.lengths[row]) for row in frontier.rows]
        ids = on_device(tokens, frontier.root.device)
        return draft._replace(side_branches=(SideBranch(ids, self.topology, partial(self._receive, frontier.rows)),))

    def trie(self, row: int) -> Trie:
        if row not in self.rows:
            self.rows[row] = Window(self.config, self.sequences.tail(row, 0))
        count, trie = self.depth(row, self.config.n - 1), Trie(1 + self.config.guesses * (self.config.n - 1))
        for guess in self.rows[row].pool.guesses(self._root(row)):
            trie.add(guess[:count])
        return trie

    def _root(self, row: int) -> int:
        return self.sequences.tail(row, self.sequences.lengths[row] - 1)[0]

    def _receive(self, rows: list[int], logits: Tensor) -> None:
        """Keep the best tokens after the last level of each window, from logits [B, M, V] after its M tokens."""
        self.answers = rows, argmax(logits[:, -self.config.window :])
