"""The reference of recipes is what the code says, and has every key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

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


@needs_all
def test_every_key_has_a_meaning(page: str) -> None:
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]
