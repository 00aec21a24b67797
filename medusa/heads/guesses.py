"""Measures of guesses: the rank of the right token among a head's guesses, and the number of accepted tokens.

Shapes: P positions, K heads, R guesses of a head, N drafted nodes, ... any positions or heads."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.tree import Tree

MISSED = 1 << 30  # the rank of a token that is not among the guesses, above every real rank


def ranks_of(tokens: Tensor, guesses: Tensor) -> Tensor:
    """Return the rank [...], from 0, of each token among the R guesses [..., R] for it; `MISSED` if absent."""
    match = guesses == tokens[..., None].to(guesses.device)
    return torch.where(match.any(-1), match.int().argmax(-1), MISSED)


def accepted(tree: Tree, ranks: Tensor, drafted: Tensor | None = None) -> Tensor:
    """Return the number [P] of drafted tokens that a decoding step at each of P positions would accept.

    `ranks` [P, K] are the ranks of the right tokens among the guesses of each head (results of `ranks_of`). `drafted`
    [P, N] are the indices in `tree` of the N nodes drafted at each position; by default all nodes are drafted."""
    nodes, beyond = tree.num_nodes, tree.max_rank + 1
    # child[node, rank]: the child with this rank, or -1. The last row and column are all -1, so that every walk ends.
    child = torch.full((nodes + 1, beyond + 1), -1)
    child[tree.parent[1:], tree.rank[1:]] = torch.arange(1, nodes)
    is_drafted = torch.ones(len(ranks), nodes + 1, dtype=torch.bool)
    if drafted is not None:
        is_drafted = torch.zeros_like(is_drafted).scatter_(1, drafted, True)
    node = torch.zeros(len(ranks), dtype=torch.long)
    length = torch.zeros_like(node)
    for head in range(min(tree.max_depth, ranks.shape[1])):
        node = child[node, ranks[:, head].clamp_max(beyond)]
        node = torch.where(is_drafted.gather(1, node[:, None] % (nodes + 1))[:, 0], node, -1)
        length += node >= 0
    return length
