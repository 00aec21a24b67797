"""Drafters without a model, which make their drafts from tries of token ids."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from decode.draft import Draft, Drafter, Frontier
from decode.drafters.base import DrafterFactory
from decode.ops.transfer import on_device
from decode.sequences import Sequences
from decode.session import Session
from decode.topology import Topology, chain


class Trie:
    """A trie of the continuations to draft for one text. Node 0 is the root, and a parent comes before its children."""

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes  # the trie starts with the root alone, and grows to this number of nodes at most
        self.ids, self.parent, self.depth = [-1], [0], [0]  # -1 stands for the root's token
        self.log_probs = [0.0]  # of each node's path; -inf where unknown
        self.child: dict[tuple[int, int], int] = {}
        self.is_chain = True

    def add(self, tokens: Sequence[int], log_probs: Iterable[float] = repeat(-math.inf)) -> None:
        """Add a continuation of the root; if the trie is full, stop before the first token that needs a new node.

        `log_probs`: of the paths to the tokens. A node keeps that of the continuation which added it."""
        node = 0
        for token, log_prob in zip(tokens, log_probs, strict=False):
            child = self.child.get((node, token))
            if child is None:
                if len(self.ids) == self.num_nodes:
                    return
                child = self.child[node, token] = len(self.ids)
                self.is_chain &= child == node + 1
                self.append(token, node, log_prob)
            node = child

    def follow(self, tokens: Iterable[int]) -> int:
        """Count the first `tokens` that are a path of the trie."""
        node = count = 0
        for token in tokens:
            if (node := self.child.get((node, token), -1)) < 0:
                break
            count += 1
        return count

    def append(self, token: int, parent: int, log_prob: float = -math.inf) -> None:
        self.ids.append(token)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.log_probs.append(min(log_prob, self.log_probs[parent]))


def draft_of(tries: list[Trie], root: Tensor, rated: bool = False) -> Draft:
    """Make the draft of a batch of B texts from their tries and root tokens [B]. Smaller tries get padding nodes.

    `rated`: whether the tries know the probabilities of their paths."""
    count = max(len(trie.ids) for trie in tries)
    for trie in tries:
        for last in range(len(trie.ids) - 1, count - 1):
            trie.append(0, last)
    ids = torch.cat([root[:, None], on_device([trie.ids for trie in tries], root.device)[:, 1:]], dim=1)
    log_probs = on_device([trie.log_probs for trie in tries], root.device) if rated else None
    if all(trie.is_chain for trie in tries):
        return Draft(ids, chain(count, root.device), log_probs=log_probs)
    parent, depth = (on_device(part, root.device) for part in ([t.parent for t in tries], [t.depth for t in tries]))
    deepest = max(max(trie.depth) for trie in tries)
    return Draft(ids, Topology.from_parents(parent, depth, deepest, count - 1), log_probs=log_probs)


@dataclass(eq=False)
class TextDrafter(ABC):
    """Base class of drafters that make one trie of continuations per text, from the texts alone and on the CPU."""

    rated: ClassVar[bool] = False  # whether its tries know the probabilities of their paths
    sequences: Sequences
    rows: dict[int, Any] = field(default_factory=dict, init=False)  # what a subclass keeps of each text

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self.rows.pop(row, None)

    def propose(self, frontier: Frontier) -> Draft:
        return draft_of([self.trie(row) for row in frontier.rows], frontier.root, self.rated)

    @abstractmethod
    def trie(self, row: int) -> Trie:
        """Make the trie of continuations to draft for the session's text with the index `row`."""

    def depth(self, row: int, most: int) -> int:
        """Return how many tokens to draft: at most `most`, and fewer than the tokens that text `row` may still get."""
        return min(most, self.sequences.tokens_left(row) - 1)


@dataclass(eq=False)
class TextDrafterFactory(DrafterFactory):
    """A factory of drafters that use no model, only the texts of a session."""

    num_nodes: int
    make: Callable[[Session], Drafter]
    num_bytes: int = 0
    warm_up: int = 0

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return self.make(session)
