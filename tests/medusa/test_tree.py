"""medusa/tree.py: topology, names of trees, and errors."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch

import medusa.tree
from decode.topology import Topology
from medusa import RequestError, Tree
from medusa.shipped import named_trees
from medusa.tree import MAX_NODES, load_tree
from tests.helpers import random_tree


def test_worked_example() -> None:
    assert doctest.testmod(medusa.tree).failed == 0


@pytest.mark.parametrize("seed", range(10))
def test_tensors_agree_with_the_definition(seed: int) -> None:
    tree = random_tree(25, seed)
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    for node in range(tree.num_nodes):
        line = [node]  # climb to the root
        while line[-1] != 0:
            line.append(parent[line[-1]])
        assert depth[node] == len(line) - 1
        assert set(tree.ancestors[node].nonzero()[:, 0].tolist()) == set(line)
        assert [n for n in tree.paths[node].tolist() if n >= 0] == line[::-1]
        assert tree.paths[node, len(line) :].eq(-1).all()
    assert depth == sorted(depth)
    assert all(parent[node] < node for node in range(1, tree.num_nodes))
    assert tree.max_depth == max(depth)


@pytest.mark.parametrize("seed", range(5))
def test_rank_paths_restores_paths_in_any_order(seed: int) -> None:
    tree = random_tree(20, seed)
    again = Tree.from_paths(reversed(tree.rank_paths))
    assert again.rank_paths == tree.rank_paths
    assert torch.equal(again.ancestors, tree.ancestors)
    assert torch.equal(again.rank, tree.rank)


def test_root_alone_is_plain_decoding() -> None:
    for tree in (Tree.chain(0), Tree.from_paths([])):
        assert (tree.num_nodes, tree.max_depth, tree.max_rank) == (1, 0, 0)
        assert tree.paths.tolist() == [[0]]
        assert tree.rank_paths == []


def test_chain_and_top_k() -> None:
    assert Tree.chain(3).rank_paths == [(0,), (0, 0), (0, 0, 0)]
    assert Tree.top_k([2, 3]).rank_paths == [(0,), (1,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert Tree.top_k([3, 3, 2]).num_nodes == 1 + 3 + 9 + 18


def test_clip_keeps_paths_up_to_the_depth() -> None:
    tree = random_tree(25, seed=3)
    clipped = tree.clip(2)
    assert clipped.rank_paths == [path for path in tree.rank_paths if len(path) <= 2]
    assert tree.clip(0).num_nodes == 1
    assert tree.clip(99).rank_paths == tree.rank_paths


def test_published_trees_equal_the_originals(shared: Path) -> None:
    original = json.loads((shared / "data/original_medusa/published_trees.json").read_text())
    ours = {name: paths for name, paths in named_trees().items() if name != "eight"}
    assert len(ours) == 9
    theirs = original.get("trees", original)
    assert all(ours[name] == theirs[name] for name in ours)


@pytest.mark.parametrize("name", sorted(named_trees()))
def test_published_trees_are_valid(name: str) -> None:
    assert load_tree(name, 5).num_nodes == len(named_trees()[name]) + 1


def test_names_of_trees(tmp_path: Path) -> None:
    assert load_tree("chain", 4).max_depth == 4
    assert load_tree("chain:2", 4).max_depth == 2
    assert load_tree("chain:0", 4).num_nodes == 1
    assert load_tree("topk:2,1", 4).rank_paths == [(0,), (1,), (0, 0), (1, 0)]
    for name, text in {"t.json": '{"paths": [[0], [0, 2]]}', "t.yaml": "paths:\n- [0]\n- [0, 2]\n"}.items():
        (tmp_path / name).write_text(text)
        assert load_tree(str(tmp_path / name), 4).rank_paths == [(0,), (0, 2)]


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ([[0, 0]], "[0]"),  # the missing parent
        ([[0], [1], [0]], "[0] twice"),
        ([[0], [-1]], "[-1]"),
        ([[0], []], "[]"),
        ([[0], [0.5]], "[0.5]"),
        ([[True]], "[True]"),
        (["0"], "'0'"),
        ([0], "0"),
        ([None], "None"),
    ],
)
def test_bad_paths_are_rejected_by_name(paths: list, named: str) -> None:
    with pytest.raises(RequestError) as error:
        Tree.from_paths(paths)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "spec",
    [
        "nonsense",
        "topk:",
        "topk:a",
        "topk:3,0",
        "topk:3,,2",
        "topk:-1",
        "topk:100,100,100",
        "chain:x",
        "chain:-1",
        "chain:5,3",
    ],
)
def test_bad_names_are_refused(spec: str) -> None:
    with pytest.raises(RequestError) as error:
        load_tree(spec, 3)
    assert spec in str(error.value)
    assert "\n" not in str(error.value)


def test_the_size_of_a_chain_is_checked_before_building(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for topk: depth d costs d * d / 2 ranks, so `chain:50000` would run for minutes before the error."""

    def build(path: object) -> None:
        raise AssertionError("paths were built before their number was looked at")

    monkeypatch.setattr(medusa.tree, "_checked", build)
    with pytest.raises(RequestError):
        load_tree(f"chain:{MAX_NODES}", 3)


@pytest.mark.parametrize("text", ["[[0]]", "{", '{"path": [[0]]}', '{"paths": 3}', '{"paths": [[0, 0]]}', "\xff\xfe"])
def test_bad_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tree.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(RequestError, match=r"must hold|neither JSON nor YAML|has no parent") as error:
        load_tree(str(path), 3)
    assert "\n" not in str(error.value)


def test_too_many_nodes_are_refused() -> None:
    with pytest.raises(RequestError, match=str(MAX_NODES)):
        Tree.from_paths([[rank] for rank in range(MAX_NODES)])


def test_a_tree_must_fit_heads_and_vocabulary() -> None:
    Tree.chain(3).require_fit(num_heads=3, vocab_size=1)
    with pytest.raises(RequestError, match="4 deep but there are 3 heads"):
        Tree.chain(4).require_fit(num_heads=3, vocab_size=10)
    with pytest.raises(RequestError, match="guess 11"):
        Tree.from_paths([[10]]).require_fit(num_heads=3, vocab_size=10)
    Tree.from_paths([[9]]).require_fit(num_heads=3, vocab_size=10)


def test_equal_trees_are_made_once(tmp_path: Path) -> None:
    """Each text that is decoded asks for its tree again; a file is read again, because it may have changed."""
    assert load_tree("topk:2,1", 5) is Tree.from_paths([[1], [0], [1, 0], [0, 0]])
    assert Topology.of(load_tree("topk:2,1", 5)) is Topology.of(Tree.top_k([2, 1]).to("cpu"))
    with torch.device("meta"), torch.inference_mode():
        made = Tree.from_paths([[0], [0, 0], [0, 0, 0], [0, 0, 1]])
    assert made.depth.is_cpu
    assert not made.depth.is_inference()
    file = tmp_path / "tree.json"
    for paths in ([[0]], [[0], [1]]):
        file.write_text(json.dumps({"paths": paths}))
        assert load_tree(str(file), 5).to_json() == paths


@pytest.mark.parametrize("spec", ["auto", "dynamic", "dynamic:16"])
def test_trees_that_decoding_chooses_are_no_static_ones(spec: str) -> None:
    with pytest.raises(RequestError, match=f"the tree '{spec}' is chosen while decoding; take a static one"):
        load_tree(spec, 4)
