"""The demo: `medusa fit` on the embedded model, shortened and with `--full` only, and the story."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa.__main__ import main
from medusa.commands import demo
from medusa.commands.fit.options import FitOptions
from medusa.commands.fit.prompts import write_prompts
from medusa.commands.fit.stages import TEST
from medusa.records.record import Record
from tests.commands.place import Place


@pytest.mark.usefixtures("short_calibrations")
def test_the_story_is_the_same_with_heads(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads are like those of `medusa fit`, whose own run is in test_fit.py; only the calibration is short."""
    heads = shutil.copytree(place.heads, tmp_path / "heads")  # where the calibration is kept
    monkeypatch.setattr(demo, "STORY_TOKENS", 8)
    write_prompts(tmp_path / TEST, [Record("mine:1", text="abc", is_prompt=True)])
    finished: Any = SimpleNamespace(work=tmp_path)
    demo.show_story(FitOptions(model=place.backbone, out=str(heads), plan=True), finished)
    told = capsys.readouterr().out
    assert "The same story" in told
    assert "Equal texts: yes" in told


@pytest.mark.full
@pytest.mark.usefixtures("short_fit")
def test_demo_runs_from_text_to_speedup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "STORY_TOKENS", 8)
    output, report = tmp_path / "demo", tmp_path / "report.json"
    numbers = "--minutes 0.004 --max-new-tokens 16 --threads 1 --dtype float32"  # given, so that none is measured
    command = f"demo --output {output} {numbers} --json {report}"
    assert main(command.split()) == 0
    told = capsys.readouterr().out
    for stage in ("1/4", "2/4", "3/4", "4/4", "The same story", "Equal texts: yes"):
        assert stage in told
    figures = json.loads(report.read_text())
    assert figures["benchmark"]["methods"]["medusa"]["equal_to_plain"] == 1.0
    assert figures["headline"]["title"] in told
    assert {"config.json", "medusa_lm_head.safetensors", "report.html"} <= {path.name for path in output.iterdir()}


def test_demo_overwrites_nothing_but_a_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["demo", "--output", str(tmp_path), "--overwrite"]) == 2
    assert "is not a folder of medusa fit" in capsys.readouterr().err
