"""decode/drafters/best_first.py: the host grows the trees that the tensor operations choose."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from decode.draft import Draft, Frontier
from decode.drafters import best_first, levelwise
from decode.drafters.layouts import DynamicTree, with_shortlist
from decode.drafters.trained_heads import heads_drafter
from decode.generation import generate
from decode.topology import HostTopology, Topology
from medusa.backbone import Backbone
from tests.helpers import VOCAB, left_padded, plain, random_heads, random_ids, random_tree

ROWS = 3


def paths_of(draft: Draft, row: int) -> set[tuple[int, ...]]:
    lines = draft.topology.paths[0 if draft.topology.is_shared else row]
    return {tuple(draft.ids[row, line[line >= 0]].tolist()) for line in lines}


@torch.no_grad()
@pytest.mark.parametrize("kind", ["medusa", "markov"])
@pytest.mark.parametrize("nodes", [2, 9, 40])
def test_the_host_chooses_the_nodes_of_the_tensor_operations(
    llama: Any, kind: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches, too, where a pruned tree has as many nodes as the largest one of the batch.

    Which nodes fill the smaller trees of a batch may differ, but none of the nodes that a text has alone is missing."""
    monkeypatch.setattr(levelwise, "width_of", lambda tree: tree.num_nodes)  # else it looks at fewer nodes
    heads, backbone = random_heads(llama, 3, kind=kind, lm_head="shared"), Backbone(llama)
    for parameter in heads.parameters():
        parameter.mul_(0.1)  # confidences below e^-50 count as equal
    hidden = torch.randn(ROWS, backbone.hidden_size, generator=torch.Generator().manual_seed(1))
    frontier = Frontier(torch.arange(3, 3 + ROWS), hidden, list(range(ROWS)))
    tree = with_shortlist(DynamicTree.over_heads(nodes, 3, (0.7, 1.0, 1.5)), VOCAB)
    assert isinstance(tree, DynamicTree)
    for least in (0.0, 1e-4, 0.02, 1.0):
        drafter = heads_drafter(heads, backbone, replace(tree, min_probability=least))
        monkeypatch.setattr(best_first, "MOST_NODES", 0)
        expected = drafter.propose(frontier)
        alone = [drafter.propose(Frontier(frontier.root[[row]], hidden[[row]], [row])) for row in range(ROWS)]
        monkeypatch.setattr(best_first, "MOST_NODES", 1000)
        draft = drafter.propose(frontier)
        assert draft.ids.shape == expected.ids.shape
        for row in range(ROWS):
            assert paths_of(draft, row) >= paths_of(alone[row], 0)
            if least == 0:
                assert paths_of(draft, row) == paths_of(expected, row)


def test_equally_probable_nodes_join_with_their_parents() -> None:
    """With confidences of exactly 1 and 0, and NaN from an overflow."""
    values = [0.0, -torch.inf, torch.nan]
    for nodes in (2, 3, 4, 9, 30):
        tree = DynamicTree.over_heads(nodes, 3)
        grown = best_first.best_first(tree, lambda depth, place: (values, range(len(values))))
        assert len(grown.parents) == nodes
        assert all(parent < node for node, parent in enumerate(grown.parents) if node)
        assert grown.depths[1:] == [grown.depths[parent] + 1 for parent in grown.parents[1:]]
        sure = [depth for depth, place in zip(grown.depths, grown.places, strict=True) if place == 0]
        assert set(range(min(nodes, 4))) <= set(sure)
        assert grown.log_probs == sorted(grown.log_probs, reverse=True)


@pytest.mark.parametrize("seed", range(8))
def test_a_topology_of_lists_is_that_of_tensors(seed: int) -> None:
    trees = [random_tree(9, 10 * seed + row, max_depth=4) for row in range(random.Random(seed).randint(1, 3))]
    parent, depth = (torch.stack([getattr(tree, name) for tree in trees]) for name in ("parent", "depth"))
    found = HostTopology(parent.tolist(), depth.tolist(), max_depth=5)
    expected = Topology.from_parents(parent, depth, 5, parent.shape[1] - 1)
    for field in fields(Topology):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name


@pytest.mark.parametrize("most", [0, 1000])
@pytest.mark.parametrize("kind", ["medusa", "markov"])
def test_texts_do_not_depend_on_who_grows_the_tree(
    llama: Any, kind: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(best_first, "MOST_NODES", most)
    heads, prompts = random_heads(llama, 3, kind=kind, lm_head="shared"), [random_ids(n, seed=n) for n in (5, 9, 7)]
    out = generate(llama, heads, **left_padded(prompts), tree="dynamic:7", max_new_tokens=20)
    for row, prompt in enumerate(prompts):
        assert out[row, 9:].tolist() == plain(llama, prompt, max_new_tokens=20)
