"""One operation that fills static trees for Markov heads on a CPU, written in C++ (trellis_fill.cpp).

A draft of the smallest models takes many short operations, and to start them takes longer than to run them. This one
searches the candidates, computes the gates, and computes only those rows of the tables that the tree reads.

Shapes: B texts, K heads (as many as the tree is deep), V tokens of the heads' vocabulary, M candidates of a head,
N nodes, H hidden size, R rank of the path term."""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor
from torch import library as operators

from decode.ops.cpp import load_operations
from medusa.tree import Tree

NAME = "trellis_fill"
_LOCK = threading.Lock()
FILLED_IN = (torch.float32, torch.float64)  # dtypes


def has_trellis_fill() -> bool:
    """Whether this machine has the operation. The first call on a machine builds it, which takes some seconds."""
    with _LOCK:  # of two threads, one builds and registers it
        return _loaded()


@functools.cache
def _loaded() -> bool:
    if not load_operations(NAME):
        return False
    operators.register_fake(f"medusa::{NAME}", _shape)
    return True


def trellis_fill(
    root: Tensor,
    hidden: Tensor,
    logits: Tensor,
    weight: Tensor,
    bias: Tensor,
    paths: Tensor,
    plan: Tensor,
    vocabulary: Tensor | None,
    shortlist: int,
) -> Tensor:
    """Fill a tree below the roots [B], which follow hidden states [B, H]; returns the tokens [B, N].

    `logits` [K, B, V] are those of the independent parts. `weight` [J, H, R] and `bias` [J, 1, R], J >= K - 1, make the
    gates of the heads after head 0. `paths` [K V, 2 R] are the rows of `decode.drafters.path_rows`, and `plan` the tree
    (`plan_of`). `vocabulary` [V] are the token ids of a reduced vocabulary. `shortlist` is M, larger than the largest
    rank in the tree. All tensors are on the CPU. All numbers are float32, or all are float64. A `RuntimeError` says if
    they are not, or if shapes do not fit together."""
    numbers = (part.contiguous() for part in (root, hidden, logits, weight, bias, paths, plan))
    named = None if vocabulary is None else vocabulary.contiguous()
    filled: Tensor = torch.ops.medusa.trellis_fill(*numbers, named, shortlist)
    return filled


def _shape(root: Tensor, hidden: Tensor, logits: Tensor, *others: Tensor | int | None) -> Tensor:
    plan = others[3]
    assert isinstance(plan, Tensor)
    return root.new_empty(root.shape[0], plan.shape[1])


def plan_of(tree: Tree) -> Tensor:
    """The tree of N nodes for `trellis_fill`, [4, N]: parents, depths, ranks, and the largest rank of each node's
    children plus 1. This last row has 0 for leaves, and for the root, whose guesses are in order."""
    tops = torch.zeros_like(tree.rank).scatter_reduce(0, tree.parent[1:], tree.rank[1:] + 1, "amax")
    tops[0] = 0
    return torch.stack([tree.parent, tree.depth, tree.rank, tops])
