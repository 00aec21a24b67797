"""Recipes, trees and prompts that come with the package are found by name, in the sources and in a wheel."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import medusa.shipped
from medusa.errors import RequestError
from medusa.files import ASSETS
from medusa.records.sources import read_records
from medusa.shipped import recipe_file, shipped_configs, tree_files
from medusa.tree import Tree, load_tree
from train.recipe import load_recipe

ROOT = Path(__file__).parents[2]


def test_the_sources_have_their_recipes_in_configs() -> None:
    assert shipped_configs() == ROOT / "configs"


def test_a_wheel_has_its_recipes_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "medusa" / "configs")
    monkeypatch.setattr(medusa.shipped, "__file__", str(tmp_path / "medusa" / "shipped.py"))
    assert shipped_configs() == tmp_path / "medusa" / "configs"
    assert recipe_file("medusa1") == tmp_path / "medusa" / "configs" / "medusa1.yaml"


def test_a_recipe_by_name_is_that_of_its_file() -> None:
    assert load_recipe("medusa1", ["data=x.jsonl"]) == load_recipe(ROOT / "configs" / "medusa1.yaml", ["data=x.jsonl"])


def test_a_file_in_the_current_folder_comes_before_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("medusa1").write_text("backbone: mine\ndata: x.jsonl\noutput_dir: y\n", encoding="utf-8")
    assert load_recipe("medusa1", []).backbone == "mine"


@pytest.mark.parametrize("typed", ["medsua1", "configs/medusa1.yaml", "medusa1.yml"])
def test_a_mistyped_recipe_is_answered_with_the_nearest(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"paper_medusa2_7b\); did you mean medusa1\?$"):
        recipe_file(typed)


def test_a_tree_by_name_is_that_of_its_file() -> None:
    assert load_tree("example", 3).to_json() == load_tree(str(tree_files()["example"]), 3).to_json()
    assert isinstance(load_tree("eight", 4), Tree)
    with pytest.raises(RequestError, match=r"did you mean example\?$"):
        load_tree("exmaple", 3)


def test_the_prompts_of_the_package_have_a_name() -> None:
    shipped, named = (list(read_records(source)) for source in (str(ASSETS / "prompts.jsonl"), "demo"))
    assert [record.text for record in named] == [record.text for record in shipped]
    assert len(named) >= 24
