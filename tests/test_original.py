"""Texts and steps equal those of the original Medusa code (commit e2a5d20), whose outputs are in ../shared.

There are 24 prompts, 4 trees and five trained heads in the original's file format; greedy, float32, EOS ignored, 128
new tokens; without --full, every second prompt and half of the tokens. The original decoded the prompts one by one;
here they are rows of one batch.
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
def test_ids_and_steps_equal_the_originals(
    name: str, original: dict[str, Any], pair: tuple[Any, MedusaHeads], full: bool
) -> None:
    assert set(original["runs"]) == set(TREES)
    run, new, prompts = original["runs"][name], 128 if full else 32, range(0, len(original["prompts"]), 2 - full)
    options = {"tree": Tree.from_paths(run["tree_paths"]), "max_new_tokens": new, "eos_token_id": None}
    batch = left_padded([original["prompts"][prompt] for prompt in prompts])
    taken = list(steps(*pair, **batch, **options, do_sample=False))
    for row, prompt in enumerate(prompts):
        own = [step for step in taken if row in step.ids]
        assert [token for step in own for token in step.ids[row]] == run["new_ids"][prompt][:new], f"prompt {prompt}"
        lengths = cut([step.lengths[row] for step in own], new)
        assert lengths == cut(run["step_lengths"][prompt], new), f"prompt {prompt}"


def test_published_trees_equal_those_of_the_original_runs(original: dict[str, Any]) -> None:
    from medusa.tree import named_trees

    for name in ("mc_sim_7b_63", "vicuna_7b_stage2"):
        assert named_trees()[name] == original["runs"][name]["tree_paths"]
