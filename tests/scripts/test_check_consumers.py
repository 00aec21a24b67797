"""scripts/check_consumers.py: what counts as equal, and that damaged exports are damaged. The consumers run weekly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import check_consumers as script
import check_layouts
from medusa import MedusaConfig, MedusaHeads
from medusa.errors import RunError
from tests.helpers import module_of

CELL = script.Cell("vllm", "eagle", "vllm", prompts=20, same_texts=20, same_steps=20, tokens_per_step=1.5)


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ([3, 1, 2], True),
        ([3, 1, 4], True),  # accepted beyond the length asked for
        ([3, 1, 1], False),
        ([3, 1], False),
        ([3, 1, 2, 1], False),
        ([], False),
    ],
)
def test_steps_are_the_same_except_that_the_last_is_cut_here(theirs: list[int], same: bool) -> None:
    assert script.same_steps(theirs, [3, 1, 2]) == same
    assert script.same_steps([3, 1], [3, 1, 1]), "a single last token needs no step"


@pytest.mark.parametrize(
    ("cell", "holds", "swapped"),
    [
        (CELL, True, False),
        (replace(CELL, same_texts=None), True, False),
        (replace(CELL, same_texts=19), False, False),
        (replace(CELL, same_steps=19), False, False),
        (replace(CELL, same_steps=0), False, True),
        (replace(CELL, same_steps=1), False, False),
        (replace(CELL, same_texts=19, same_steps=0), False, False),
        (replace(CELL, error="no tensor"), False, False),
        (replace(CELL, error="no tensor", same_steps=0), False, False),
    ],
)
def test_a_cell_holds(cell: script.Cell, holds: bool, swapped: bool) -> None:
    assert cell.holds(swapped=False) == holds
    assert cell.holds(swapped=True) == swapped


def test_steps_through_a_known_text() -> None:
    """The drafter counts on from the root: after 2 it is right about 3 and 4, and after 6 about 7."""
    walk = module_of(Path(script.__file__).with_name("consumers") / "walk.py")
    ids = [9, 2, 3, 4, 8, 6, 7]
    assert walk.step_lengths(ids, 1, lambda place: [ids[place] + 1, ids[place] + 2, ids[place] + 3]) == [3, 1, 2]


def test_halves_are_swapped(tmp_path: Path) -> None:
    before = {"layers.0.self_attn.q_proj.weight": torch.arange(8.0).view(4, 2), "fc.weight": torch.eye(2)}
    save_file(before, tmp_path / "model.safetensors")
    script.swap_halves(tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert after["layers.0.self_attn.q_proj.weight"].tolist() == [[4, 5], [6, 7], [0, 1], [2, 3]]
    assert torch.equal(after["fc.weight"], before["fc.weight"])
    save_file({"fc.weight": torch.eye(2)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="no matrix whose halves can be swapped"):
        script.swap_halves(tmp_path)


@pytest.mark.parametrize(("kind", "block"), [("cascade", "mlp"), ("medusa", "square")])
def test_exports_of_our_own_format_have_matrices_to_swap(kind: str, block: str, tmp_path: Path) -> None:
    settings = {"hidden_size": 8, "vocab_size": 11, "num_heads": 2, "kind": kind, "block": block}
    MedusaHeads.from_config(MedusaConfig(**settings)).save_pretrained(tmp_path)
    script.swap_halves(tmp_path)


def test_every_consumer_has_its_file_and_known_kinds() -> None:
    folder = Path(script.__file__).with_name("consumers")
    assert {path.stem for path in folder.glob("by_*.py")} == {f"by_{name}" for name in script.CONSUMERS}
    assert {path.stem for path in folder.glob("write_*.py")} == {f"write_{name}" for name in check_layouts.PROJECTS}
    kinds = [kind for consumer in script.CONSUMERS.values() for kinds in consumer.reads.values() for kind in kinds]
    assert set(kinds) == set(script.KINDS)
