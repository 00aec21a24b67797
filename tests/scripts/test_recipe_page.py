"""The reference of recipes is what the code says, and has every key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import recipe_page
from train.arguments import MedusaTrainingArguments, training_section
from train.config import TrainConfig, own_key_paths
from train.sections import key_paths
from train.trainer_keys import KEYS, UNUSED

ROOT = Path(__file__).resolve().parents[2]
ALL_FIELDS = set(KEYS) <= {field.name for field in fields(MedusaTrainingArguments)}
needs_all = pytest.mark.skipif(not ALL_FIELDS, reason="this version of transformers lacks keys")


@pytest.fixture(scope="module")
def page() -> str:
    return recipe_page.PAGE.read_text(encoding="utf-8")


@needs_all
def test_the_page_is_what_the_code_generates(page: str) -> None:
    assert page == recipe_page.recipe_page(), "run python scripts/recipe_page.py"


@needs_all
def test_the_page_has_every_key(page: str) -> None:
    evaluated = [path for path in key_paths(TrainConfig) if path.startswith("eval_data.")]  # listed with data
    expected = {
        *key_paths(TrainConfig),
        *own_key_paths(),
        *(f"training.{name}" for name in training_section().model_fields),
    }
    listed = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert set(listed) == expected - set(evaluated)
    assert len(listed) == len(set(listed))
    assert all(f"`{name}`" in page for name in UNUSED)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_the_shipped_recipes_is_on_the_page(page: str, path: Path) -> None:
    def paths(content: dict[str, Any], prefix: str = "") -> list[str]:
        inner = [one for key, value in content.items() if isinstance(value, dict) for one in paths(value, f"{key}.")]
        return [prefix + key for key in content] + inner

    for name in paths(yaml.safe_load(path.read_text(encoding="utf-8"))):
        assert f"| `{name}` |" in page


def test_types_are_described_in_words() -> None:
    assert recipe_page._kind({"type": "integer", "minimum": 1}) == "int ≥ 1"
    assert recipe_page._kind({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]}) == "float > 0"
    assert recipe_page._kind({"enum": ["a", "b"]}) == "`a`, `b`"
    assert recipe_page._kind({}) == "any"


@needs_all
def test_defaults_and_meanings_are_those_of_the_code(page: str) -> None:
    assert "| `training.save_total_limit` | `2` | Number of checkpoints to keep" in page
    assert "| `training.learning_rate` |  |" in page
    assert "| `backbone` | str | required |" in page
    assert all(
        line.count("|") >= 4 and not line.endswith("|  |") for line in page.splitlines() if line.startswith("| `")
    )
