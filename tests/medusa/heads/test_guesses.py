"""medusa/heads/guesses.py: ranks of correct tokens, and the accepted depth in a tree, compared with a search."""

from __future__ import annotations

import pytest
import torch

from medusa.heads.guesses import MISSED, accepted, ranks_of
from medusa.tree import Tree
from tests.helpers import random_tree


def test_ranks_are_positions_in_the_sorted_guesses() -> None:
    guesses = torch.tensor([[7, 3, 5], [1, 2, 3]])
    assert ranks_of(torch.tensor([5, 9]), guesses).tolist() == [2, MISSED]


@pytest.mark.parametrize("seed", range(3))
def test_the_accepted_length_is_the_longest_correct_drafted_path(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(20, seed, max_rank=3, max_depth=4)
    ranks = torch.randint(0, 4, (60, 4), generator=generator)
    ranks[ranks == 3] = MISSED
    drafted = torch.stack([torch.randperm(tree.num_nodes, generator=generator)[:15] for _ in range(60)])

    def longest(row: int, nodes: set[int]) -> int:
        """The length of the longest correct path from the root through `nodes`."""
        lengths = [0]
        for node, path in enumerate(tree.rank_paths, 1):
            line = [n for n in tree.paths[node].tolist() if n > 0]
            if list(path) == ranks[row, : len(path)].tolist() and nodes >= set(line):
                lengths.append(len(path))
        return max(lengths)

    everything = set(range(tree.num_nodes))
    assert accepted(tree, ranks).tolist() == [longest(row, everything) for row in range(60)]
    chosen = [set(nodes) for nodes in drafted.tolist()]
    assert accepted(tree, ranks, drafted).tolist() == [longest(row, nodes) for row, nodes in enumerate(chosen)]


def test_a_missed_token_is_never_accepted() -> None:
    tree = Tree.top_k([40])
    assert accepted(tree, torch.tensor([[39], [MISSED]])).tolist() == [1, 0]
    assert accepted(Tree.chain(0), torch.tensor([[0]])).tolist() == [0]
