"""The whole demo, shortened: `medusa fit`, with `--full` on the embedded model, and the story."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa.__main__ import main
from medusa.commands import demo
from medusa.commands.fit.options import FitOptions
from tests.commands.place import Place


@pytest.mark.slow
@pytest.mark.usefixtures("short_fit")
def test_demo_runs_from_text_to_speedup(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    monkeypatch.setattr(demo, "STORY_TOKENS", 8)
    if not full:  # tests/scripts/test_real_model.py writes text and trains heads with the embedded model
        monkeypatch.setattr(demo, "FitOptions", lambda **given: FitOptions(**given | {"model": place.backbone}))
    output, report = tmp_path / "demo", tmp_path / "report.json"
    numbers = "--minutes 0.01 --max-new-tokens 16 --threads 1 --dtype float32"  # given, so that none is measured
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
