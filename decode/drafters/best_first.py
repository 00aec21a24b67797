"""Dynamic trees that the host grows on a CPU: the most probable node outside the tree joins it, until it is full.

The tensor operations that choose such trees (`DynamicTree.most_probable`, `LevelwiseDrafter`) run on every device. But
for the few nodes that pay on a CPU, starting them takes longer than this search. With it, a draft of 16 nodes for one
text takes 1.2 instead of 1.5 ms (`markov` heads, the included model). It is for drafters that know the confidences of
all guesses before the tree grows.

Shapes: B texts, K heads, N nodes of a tree, M guesses of a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.layouts import MIN_LOG_CONFIDENCE, STEEPNESS, DynamicTree
from decode.topology import HostTopology

MOST_NODES = 64
"""Nodes of all texts together up to which the search on the host is faster."""

Tokens = Sequence[Sequence[Sequence[int]]]
Ranked = tuple[Sequence[float], Sequence[int]]
"""The log confidences of the best guesses after a node, the best first, and each one's place among the M guesses."""


class Grown(NamedTuple):
    """The N nodes of a tree, the root first, then the most probable first."""

    parents: list[int]  # the index of each node's parent; 0 for the root
    depths: list[int]
    places: list[int]  # the place of each node's token among the M guesses of its depth; any value for the root
    log_probs: list[float]  # of the paths to the nodes, descending


def grows_on_host(root: Tensor, tree: DynamicTree) -> bool:
    """Whether `grown_on_host` is faster for texts whose roots are `root` [B], and can run."""
    return not torch.compiler.is_compiling() and root.is_cpu and len(root) * tree.num_nodes <= MOST_NODES


def grown_on_host(root: Tensor, tree: DynamicTree, ids: Tokens, guesses: Callable[[int, int, int], Ranked]) -> Draft:
    """Draft the most probable nodes below the roots [B]; `ids` [K, B, M] are the tokens that the heads guess.

    `guesses(row, depth, place)` are the guesses after a node of this depth, whose token has this place at its depth."""
    grown = [best_first(tree, partial(guesses, row)) for row in range(len(root))]
    # Every text gets as many nodes as the one with the most worthwhile nodes, so that tensors have one size.
    size = max(tree.num_worthwhile_on_host(one.log_probs) for one in grown)
    nodes = []
    for row, (token, one) in enumerate(zip(root.tolist(), grown, strict=True)):
        below = zip(one.depths[1:size], one.places[1:size], strict=True)
        nodes.append([token, *(ids[depth - 1][row][place] for depth, place in below)])
    parents, depths = [one.parents[:size] for one in grown], [one.depths[:size] for one in grown]
    return Draft(torch.from_numpy(np.array(nodes)), HostTopology(parents, depths, tree.max_depth))


def best_first(tree: DynamicTree, guesses: Callable[[int, int], Ranked]) -> Grown:
    """Grow a tree of the most probable nodes, of at most `tree.num_nodes` nodes and `tree.max_depth`.

    A node's siblings wait in order of their confidence, so only the next one of them is a candidate."""
    grown, serial = Grown([0], [0], [0], [0.0]), 0
    waiting: list[tuple[float, int, int, int, float, Ranked]] = []  # a call of such a type takes a microsecond
    parents, depths, places, log_probs = grown
    node = 0  # the last one that joined the tree
    while len(parents) < tree.num_nodes:
        if depths[node] < tree.max_depth:
            ranked = guesses(depths[node], places[node])
            above = log_probs[node] - STEEPNESS
            serial += 1  # of two equally probable nodes, the one that has waited longer joins
            heappush(waiting, (-above - max(MIN_LOG_CONFIDENCE, ranked[0][0]), serial, node, 0, above, ranked))
        if not waiting:
            break
        cost, _, parent, rank, above, ranked = heappop(waiting)
        confidences, its_places = ranked
        if rank + 1 < len(confidences):
            serial += 1
            later = -above - max(MIN_LOG_CONFIDENCE, confidences[rank + 1])
            heappush(waiting, (later, serial, parent, rank + 1, above, ranked))
        node = len(parents)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        places.append(its_places[rank])
        log_probs.append(-cost)
    return grown
