"""Predicts tau by replaying a recording, and grows the best trees for a recording.

A step starts where the previous one ended, which is just after a wrong guess. Averages over all positions are therefore
too high (by 5 to 22 % on stories260K), so tau is counted only at positions where steps start.

Shapes: P positions of a text.
"""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from decode.bench.calibration.recording import Recording
from medusa.heads.guesses import MISSED, accepted
from medusa.tree import Layout, RankPath, Tree

MAX_ROUNDS = 8  # of growing and replaying; three are usual


def starts(lengths: Tensor, num_heads: int) -> list[int]:
    """Accepted lengths [P] -> the positions where steps start, without those that might pass the end of the text."""
    numbers, at, found = lengths.tolist(), 0, []
    while at < len(numbers) - num_heads:
        found.append(at)
        at += 1 + numbers[at]
    return found


def predicted_tau(tree: Layout, recording: Recording) -> float:
    """Mean tokens per step, the root included, when the recorded texts are decoded with `tree`."""
    steps = tokens = 0
    for text, ranks in enumerate(recording.ranks):
        lengths = recording.accepted(tree, text)
        at = starts(lengths, ranks.shape[1])
        steps, tokens = steps + len(at), tokens + len(at) + int(lengths[at].sum())
    return tokens / max(steps, 1)


def predicted_tau_held_out(nodes: int, recording: Recording) -> float:
    """tau of a grown tree of `nodes` nodes on held-out texts: each half of the texts with the tree of the other half.

    On the texts that a tree was grown from, tau is too high, most of all for few texts and many nodes.
    """
    halves = [recording.part(range(first, len(recording.ranks), 2)) for first in range(2)]
    if not all(half.has_steps for half in halves):
        return predicted_tau(grow(recording, nodes), recording)
    steps = tokens = 0.0
    for of, on in (halves, halves[::-1]):
        steps += on.tokens / predicted_tau(grow(of, nodes), on)
        tokens += on.tokens
    return tokens / steps


def grow(recording: Recording, nodes: int) -> Tree:
    """The best tree of `nodes` nodes, the root included. If fewer paths are ever right, the tree is smaller.

    The value of a node is the number of times that its whole path is right. A path is never right more often than its
    beginning, so the most frequent paths form a tree. They are counted where the steps of the tree start. Since these
    positions depend on the tree, counting and growing are repeated, at first with all positions, until a tree recurs.
    The tree with the highest predicted tau on the way is returned.
    """
    best, best_tau, seen, tree = Tree.chain(0), 0.0, set(), None
    for _ in range(MAX_ROUNDS):
        counts = path_counts(recording, tree)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
        paths = [path for path, _ in ranked[: nodes - 1]]
        tree = Tree.from_paths(paths)
        if (found := predicted_tau(tree, recording)) > best_tau:
            best, best_tau = tree, found
        if (key := frozenset(paths)) in seen:
            break
        seen.add(key)
    return best


def path_counts(recording: Recording, tree: Tree | None) -> Counter[RankPath]:
    """How often each path of ranks is right where the steps of `tree` start, or at all positions."""
    counts: Counter[RankPath] = Counter()
    for ranks in recording.ranks:
        rows = ranks if tree is None else ranks[starts(accepted(tree, ranks), ranks.shape[1])]
        for line in rows.tolist():
            right = line[: line.index(MISSED)] if MISSED in line else line
            counts.update(tuple(right[:depth]) for depth in range(1, len(right) + 1))
    return counts
