"""The whole demo, shortened: the embedded backbone writes, heads are trained, the text stays the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decode.settings import Settings
from medusa.__main__ import main


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every text at 32 tokens: nothing but tau depends on the length."""
    checked = Settings.__post_init__

    def cut(self: Settings) -> None:
        object.__setattr__(self, "max_new_tokens", min(self.max_new_tokens, 32))
        checked(self)

    monkeypatch.setattr(Settings, "__post_init__", cut)


@pytest.mark.usefixtures("short_texts")
def test_demo_runs_from_writing_to_speedup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = tmp_path / "demo", tmp_path / "report.json"
    command = f"demo --output {output} --texts 16 --minutes 0.02 --max-prompts 2 --threads 1 --json {report}"
    assert main(command.split()) == 0
    told = capsys.readouterr().out
    for stage in ("1/4", "2/4", "3/4", "4/4"):
        assert stage in told
    figures = json.loads(report.read_text())["methods"]["medusa"]
    assert figures["equal_to_plain"] == 1.0
    assert f"{figures['speedup_vs_generate']:.2f} times as fast as model.generate" in told
    assert {file.name for file in (output / "heads").iterdir()} == {
        "config.json",
        "medusa_lm_head.safetensors",
        "provenance.json",
        "training.png",
    }
    assert json.loads((output / "benchmark.json").read_text()) == json.loads(report.read_text())


def test_demo_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--output", str(tmp_path)]) == 2
    assert "--overwrite" in capsys.readouterr().err
