"""Candidates of Markov heads, and the rows of their tables that a tree reads, computed by NumPy: for drafts on a CPU.

Of K - 1 tables with M rows of M scores, a tree reads few rows. In batches, putting all rows in order takes most of a
draft's own work. In a loop, NumPy takes 11 us for a level of a static tree for one text and 14 for eight, and 13 us for
a node of a dynamic tree.

Shapes: B texts, K heads, M candidates of a head, N nodes, W expanded nodes of a level (those with children), R the rank
of the path term, V the backbone's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decode.drafters.best_first import Ranked
from decode.drafters.levelwise import Level
from decode.drafters.path_rows import PathRows

Indices = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating]


class Candidates(NamedTuple):
    """The candidates of K heads in B texts, and all that the scores after each of them are computed from.

    For dynamic trees, logits are divided by the heads' temperatures."""

    ids: Tensor  # [K, B, M] the token ids of each head's candidates, the most probable first
    first: Tensor  # [B, 1, M] scores of the first head's candidates: logits, or for dynamic trees confidences
    alone: Tensor  # [K - 1, B, M] the logits of the other heads' candidates without path terms
    gates: Tensor  # [K - 1, B, R] what the path terms let through
    guesses: Tensor  # [K - 1, B, M, R] the rows of the candidates as guesses (`PathRows`)
    held: Tensor  # [K - 1, B] the log probability of all candidates of a head together; empty for static trees

    def after(self, values: Tensor) -> Tensor:
        """Compute the logits of all heads' candidates after W tokens each, [K - 1, B, W, M].

        `values` [K - 1, B, W, R] are the rows of these tokens (`PathRows`)."""
        paths = (self.gates[:, :, None] * values) @ self.guesses.transpose(2, 3)
        return self.alone[:, :, None] + paths.to(self.alone)


class HostLevel(NamedTuple):
    """One level of a static tree, a `Level`, in the host's memory."""

    top: int
    guess: Indices  # [nodes of the level]
    expanded: Indices  # [W of the next level]

    @classmethod
    def of(cls, level: Level) -> HostLevel:
        return cls(level.top, level.guess.numpy(), level.expanded.numpy())


class HostRows:
    """The scores after nodes of B drafts, computed from the candidates of K heads."""

    def __init__(self, found: Candidates, kept: PathRows) -> None:
        self.ids: Indices = found.ids.numpy()  # [K, B, M]
        self.first, self.alone, self.gates, self.guesses = map(_array, found[1:5])  # as in `Candidates`
        self.before, self.vocab_size = _array(kept.before), kept.vocab_size  # [(K - 1) V, R]
        self.held = _array(found.held)  # [K - 1, B] for dynamic trees

    def filled(self, root: Tensor, levels: Sequence[HostLevel]) -> Tensor:
        """Fill a static tree of depth K below each of the roots [B]: the tokens [B, N]."""
        texts = np.arange(len(root))[:, None]
        tokens, above = [root.numpy()[:, None]], np.zeros_like(texts)
        for ids, depth, level in zip(self.ids, range(len(levels)), levels, strict=True):
            if depth:
                scores = self._after_level(depth - 1, texts, above)
                best = scores.argmax(-1) if level.top == 1 else (-scores).argsort(-1)[..., : level.top]
                places = best.reshape(len(texts), -1)[:, level.guess]  # [B, nodes]
            else:
                places = np.broadcast_to(level.guess, (len(texts), len(level.guess)))  # the candidates are in order
            tokens.append(ids[texts, places])
            above = places[:, level.expanded]
        return torch.from_numpy(np.concatenate(tokens, axis=1))

    def _after_level(self, head: int, texts: Indices, places: Indices) -> Scores:
        """Compute the scores [B, W, M] after the candidates of a head at `places` [B, W]."""
        values = self.before[self.ids[head][texts, places] + head * self.vocab_size]
        values *= self.gates[head][:, None]
        return np.matmul(values, self.guesses[head].swapaxes(1, 2)) + self.alone[head][:, None]

    def ranked(self, count: int, text: int, depth: int, place: int) -> Ranked:
        """Find the log confidences of the `count` best guesses after a candidate, or at depth 0 after the root."""
        if depth == 0:
            return self.first[text, 0, :count].tolist(), range(count)  # the candidates are in order
        head = depth - 1
        values = self.before[self.ids[head, text, place] + head * self.vocab_size] * self.gates[head, text]
        scores = self.guesses[head, text] @ values + self.alone[head, text]
        order = (-scores).argsort()[:count]
        top = scores[order[0]]
        shift = self.held[head, text] - top - math.log(np.exp(scores - top).sum())
        return (scores[order] + shift).tolist(), order.tolist()


def _array(values: Tensor) -> Scores:
    """The numbers of a tensor in the host's memory; NumPy does not know bfloat16."""
    return (values.float() if values.itemsize == 2 else values).detach().numpy()
