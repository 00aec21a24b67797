"""Comparison of kinds of heads: the figures exist, and trees are those of the calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import compare_kinds as script
from decode.bench.calibration.stored import FILE, Calibration, CalibrationPoint, RecordedTexts, situation, store
from decode.settings import Settings
from medusa import Tree
from medusa.commands.options import Models
from medusa.errors import RequestError
from medusa.loading import load_backbone
from tests.helpers import random_heads


@pytest.mark.usefixtures("one_tree_check")
def test_two_kinds_on_the_embedded_backbone(tmp_path: Path) -> None:
    model = load_backbone("demo").model
    for kind in ("medusa", "eagle"):
        random_heads(model, 2, kind=kind, lm_head="shared").save_pretrained(tmp_path / kind)
    argv = ["--backbone", "demo", "--prompts", "demo", "--max-prompts", "2", "--batch-size", "2"]
    argv += ["--trees", "chain", "topk:2,2"]
    argv += ["--heads", f"one={tmp_path / 'medusa'}", f"two={tmp_path / 'eagle'}", "--threads", "1"]
    argv += ["--max-new-tokens", "4", "--rounds", "1", "--json", str(tmp_path / "out.json"), "--quiet"]
    script.main(argv)
    rows = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["heads"], row["tree"], row["nodes"]) for row in rows] == [
        ("one", "chain", 3),
        ("one", "topk:2,2", 7),
        ("two", "chain", 3),
        ("two", "topk:2,2", 7),
    ]
    for row in rows:
        assert row["equal_to_plain"] == 1
        assert row["tau"] >= 1
        assert row["tokens_per_second"] > 0


def test_calibrated_trees_depend_on_the_heads(tmp_path: Path) -> None:
    loaded = load_backbone("demo")
    heads = random_heads(loaded.model, 2, lm_head="shared")
    heads.save_pretrained(tmp_path)
    settings = Settings(max_new_tokens=6, ignore_eos=True)
    points = [CalibrationPoint(3, [[0], [0, 1]], 1.5, 2.0), CalibrationPoint(3, [], 1.6, 2.0, dynamic=True)]
    found = Calibration(
        points, 0, [1.0, 1.0], situation(loaded.model, heads, settings, 1), RecordedTexts(1, steps=500), shortlist=8
    )
    store([tmp_path / FILE], found)
    models = Models(backbone="demo", heads=str(tmp_path), tree="calibrated:3")
    options = script.KindsOptions(models=models, settings=settings, heads=())
    tree = script.tree_for(options, loaded, heads)
    assert isinstance(tree, Tree)
    assert tree.rank_paths == [(0,), (0, 1)]
    assert tree.shortlist == 8
    options = replace(options, models=replace(models, tree="calibrated:4"))
    with pytest.raises(RequestError, match="calibrated with 3 nodes"):
        script.tree_for(options, loaded, heads)
    options = replace(options, models=replace(models, heads=str(tmp_path / "elsewhere")))
    with pytest.raises(RequestError, match="no calibration for this situation"):
        script.tree_for(options, loaded, heads)


def test_results_name_no_folder_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "backbone").mkdir()
    monkeypatch.chdir(tmp_path)
    places = [str(tmp_path / "backbone"), "backbone", "./backbone/", "demo", "org/model"]
    assert [script.without_folder(place) for place in places] == ["backbone"] * 3 + ["demo", "org/model"]
