"""Texts and steps equal those of the original Medusa code (commit e2a5d20), whose outputs are in ../shared.

The test uses 24 prompts, 4 trees and five trained heads in the original's file format; greedy, float32, EOS ignored,
128 new tokens. The original decoded the prompts one by one; here they are rows of one batch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode import steps
from medusa import MedusaHeads, Tree
from medusa.loading import LoadOptions, load_backbone
from tests.helpers import left_padded

NEW = 128
TREES = ["mc_sim_7b_63", "vicuna_7b_stage2", "small_11_nodes", "chain_5"]


@pytest.fixture(scope="module")
def original(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "data/original_medusa/stories260K_greedy.json").read_text())


@pytest.fixture(scope="module")
def pair(shared: Path) -> tuple[Any, MedusaHeads]:
    model = load_backbone(str(shared / "models/stories260K"), LoadOptions("float32", "cpu")).model
    return model, MedusaHeads.from_pretrained(shared / "models/stories260K-medusa5-original")


def cut(lengths: list[int], total: int) -> list[int]:
    """Step lengths up to `total` tokens, with the last length cut, as the original writes more."""
    out: list[int] = []
    for length in lengths:
        if sum(out) < total:
            out.append(min(length, total - sum(out)))
    return out


@pytest.mark.parametrize("name", TREES)
def test_ids_and_steps_equal_the_originals(name: str, original: dict[str, Any], pair: tuple[Any, MedusaHeads]) -> None:
    assert set(original["runs"]) == set(TREES)
    run = original["runs"][name]
    tree = Tree.from_paths(run["tree_paths"])
    options = {"tree": tree, "max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    taken = list(steps(*pair, **left_padded(original["prompts"]), **options))
    for index in range(len(original["prompts"])):
        own = [step for step in taken if index in step.ids]
        new_ids = [token for step in own for token in step.ids[index]]
        assert new_ids == run["new_ids"][index][:NEW], f"prompt {index}"
        assert cut([step.lengths[index] for step in own], NEW) == cut(run["step_lengths"][index], NEW), (
            f"prompt {index}"
        )


def test_published_trees_equal_those_of_the_original_runs(original: dict[str, Any]) -> None:
    from medusa.tree import named_trees

    for name in ("mc_sim_7b_63", "vicuna_7b_stage2"):
        assert named_trees()[name] == original["runs"][name]["tree_paths"]
