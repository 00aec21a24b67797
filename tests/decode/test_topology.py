"""decode/topology.py: one topology for all rows, or one for each."""

from __future__ import annotations

import pytest
import torch

from decode.topology import Topology
from medusa.tree import Tree
from tests.helpers import random_tree

T, F = True, False


@pytest.mark.parametrize("seed", range(5))
def test_from_parents_equals_the_trees_topology(seed: int) -> None:
    """A tree computes its topology node by node; `from_parents` computes levels for several rows at once."""
    trees = [random_tree(12, seed=seed), random_tree(12, seed=seed + 100)]
    deepest = max(tree.max_depth for tree in trees)
    parent, depth = (torch.stack([getattr(tree, name) for tree in trees]) for name in ("parent", "depth"))
    found = Topology.from_parents(parent, depth, deepest, max_children=12)
    for row, tree in enumerate(trees):
        assert torch.equal(found.ancestors[row], tree.ancestors)
        assert torch.equal(found.paths[row, :, : tree.max_depth + 1], tree.paths)
        assert (found.paths[row, :, tree.max_depth + 1 :] == -1).all()
        held = [[child for child in line if child >= 0] for line in found.children()[row].tolist()]
        assert found.places()[row].tolist() == [
            next((line.index(node) for line in held if node in line), 0) for node in range(tree.num_nodes)
        ]
        assert held == [[child for child in line if child >= 0] for line in tree.children.tolist()]


def test_topology_with_only_the_root() -> None:
    found = Topology.from_parents(torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long), 0, 0)
    assert found.ancestors.tolist() == [[[T]], [[T]]]
    assert found.paths.tolist() == [[[0]], [[0]]]


def test_topology_with_two_drafts_under_one_root() -> None:
    """The second draft's nodes follow the first's, and attend only to the root and their own ancestors."""
    first, second = (Topology.of(Tree.from_paths(paths)) for paths in ([[0], [1]], [[0], [0, 0]]))
    both = first.beside(second)
    assert both.parent.tolist() == [[0, 0, 0, 0, 3]]
    assert both.depth.tolist() == [[0, 1, 1, 1, 2]]
    assert both.ancestors.tolist() == [
        [
            [T, F, F, F, F],
            [T, T, F, F, F],
            [T, F, T, F, F],
            [T, F, F, T, F],
            [T, F, F, T, T],
        ]
    ]
    assert both.paths.tolist() == [[[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 3, -1], [0, 3, 4]]]
