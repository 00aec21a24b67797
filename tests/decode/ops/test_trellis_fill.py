"""decode/ops/trellis_fill.py: one operation in C++ fills trees as plain loops do, and refuses what does not fit."""

from __future__ import annotations

import functools
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from decode.ops import cpp
from decode.ops import trellis_fill as module
from decode.ops.trellis_fill import has_trellis_fill, plan_of, trellis_fill
from medusa import Tree
from tests.helpers import random_tree

pytestmark = pytest.mark.skipif(cpp._compiler() is None, reason="no C++ compiler")
K, TEXTS, SIZE, RANK = 4, 3, 6, 5


def inputs(tokens: int, dtype: torch.dtype = torch.float64, texts: int = TEXTS, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "hidden": (texts, SIZE),
        "logits": (K, texts, tokens),
        "weight": (K, SIZE, RANK),  # of one head more than the tree needs
        "bias": (K, 1, RANK),
        "paths": (K * tokens, 2 * RANK),
    }
    found = {name: torch.randn(*shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return {"root": torch.arange(7, 7 + texts), **found}


def by_loops(tree: Tree, shortlist: int, vocabulary: Tensor | None, **given: Tensor) -> list[list[int]]:
    """What the operation computes, token by token."""
    tokens, texts = given["logits"].shape[2], []
    for text, root in enumerate(given["root"].tolist()):
        candidates = [row[text].topk(shortlist).indices for row in given["logits"]]
        places, held = [-1], [root]
        for node in range(1, tree.num_nodes):
            parent, rank, head = int(tree.parent[node]), int(tree.rank[node]), int(tree.depth[node]) - 1
            scores = given["logits"][head, text, candidates[head]]
            if head:
                gates = (given["hidden"][text] @ given["weight"][head - 1] + given["bias"][head - 1, 0]).sigmoid()
                before = given["paths"][(head - 1) * tokens + places[parent], RANK:]
                scores = scores + given["paths"][head * tokens + candidates[head], :RANK] @ (gates * before)
            places.append(int(candidates[head][scores.argsort(descending=True)[rank]]))
            held.append(places[-1] if vocabulary is None else int(vocabulary[places[-1]]))
        texts.append(held)
    return texts


@pytest.fixture(autouse=True)
def built() -> None:
    assert has_trellis_fill(), "this machine has a compiler, so it must have the operation"


# Rows of up to 63 values and of more than 4,127 are searched by insertion, others by lanes of 32, with a rest that
# fills no lane.
@pytest.mark.parametrize("tokens", [9, 63, 64, 100, 1000, 5000])
@pytest.mark.parametrize("shortlist", [5, 16, 17, "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_trees_are_those_of_plain_loops(tokens: int, shortlist: int | str, dtype: torch.dtype) -> None:
    count = min(tokens, 1000) if shortlist == "all" else min(tokens, int(shortlist))
    vocabulary = torch.randperm(9000, generator=torch.Generator().manual_seed(1))[:tokens]
    trees = [random_tree(12, seed, max_rank=4, max_depth=K) for seed in range(4)]
    for seed, tree in enumerate([*trees, Tree.chain(K), Tree.chain(1), Tree.chain(0)]):
        given = inputs(tokens, dtype, seed=seed)
        for named in (None, vocabulary):
            filled = trellis_fill(**given, plan=plan_of(tree), vocabulary=named, shortlist=count)
            assert filled.tolist() == by_loops(tree, count, named, **given)


@pytest.mark.parametrize("count", [1, 8, 16])
def test_of_equal_values_any_are_found_but_none_twice(count: int) -> None:
    """Values of a few sizes, and all equal: a tree of width `count` holds distinct tokens that topk may find."""
    tree = Tree.from_paths([[rank] for rank in range(count)])
    for levels, tokens in itertools.product((1, 2, 5, 40), (300, 5000)):
        given = inputs(tokens)
        given["logits"] = (given["logits"] * 3).round().remainder(levels)
        filled = trellis_fill(**given, plan=plan_of(tree), vocabulary=None, shortlist=count)[:, 1:]
        for text in range(TEXTS):
            row = given["logits"][0, text]
            assert len(set(filled[text].tolist())) == count
            assert torch.equal(row[filled[text]], row.topk(count).values)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_no_numbers_give_tokens(bad: float) -> None:
    """A broken model must not make the operation read or write elsewhere."""
    tree, tokens = random_tree(12, 1, max_depth=K), 300
    for name in ("logits", "hidden", "paths"):
        for share in (0.01, 0.5, 1.0):
            given = inputs(tokens)
            hit = torch.rand(given[name].shape, generator=torch.Generator().manual_seed(2)) < share
            given[name] = given[name].masked_fill(hit, bad)
            filled = trellis_fill(**given, plan=plan_of(tree), vocabulary=None, shortlist=8)
            assert bool(((filled[:, 1:] >= 0) & (filled[:, 1:] < tokens)).all())


WRONG: dict[str, dict[str, Any]] = {
    "dtype": {"hidden": torch.zeros(TEXTS, SIZE)},
    "texts": {"root": torch.zeros(TEXTS + 1, dtype=torch.long)},
    "root": {"root": torch.zeros(TEXTS)},
    "gates": {"weight": torch.zeros(K - 2, SIZE, RANK, dtype=torch.float64)},
    "biases": {"bias": torch.zeros(K, 1, RANK + 1, dtype=torch.float64)},
    "paths": {"paths": torch.zeros(K * 40 - 1, 2 * RANK, dtype=torch.float64)},
    "vocabulary": {"vocabulary": torch.arange(39)},
    "shortlist": {"shortlist": 41},
    "no candidates": {"shortlist": 0},
    "ranks": {"shortlist": 2},
    "too deep": {"plan": plan_of(Tree.chain(K + 1))},
    "no tree": {"plan": plan_of(Tree.chain(K)).flip(1).contiguous()},
    "dimensions": {"plan": torch.zeros(12, dtype=torch.long)},
}


@pytest.mark.parametrize("name", WRONG)
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    given: dict[str, Any] = {**inputs(40), "plan": plan_of(Tree.top_k([3, 1])), "vocabulary": None, "shortlist": 4}
    expected = trellis_fill(**given)
    turned = given | {"logits": given["logits"].transpose(0, 1).contiguous().transpose(0, 1)}
    assert torch.equal(trellis_fill(**turned), expected), "another layout is copied"
    with pytest.raises(RuntimeError, match="trellis_fill"):
        trellis_fill(**given | WRONG[name])


def test_of_several_threads_one_builds_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    @functools.cache
    def slow() -> bool:
        time.sleep(0.02)
        built.append(True)
        return True

    monkeypatch.setattr(module, "_loaded", slow)
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: module.has_trellis_fill(), range(8)))
    assert len(built) == 1


def test_the_operation_can_be_compiled() -> None:
    """PyTorch's own checks: the schema, and shapes without data."""
    given = inputs(40)
    arguments = (*given.values(), plan_of(Tree.chain(K)), torch.arange(40), 4)
    opcheck(torch.ops.medusa.trellis_fill.default, arguments)
