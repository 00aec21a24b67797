"""scripts/reproduce_stories260k.py: wrong requests are refused before the first training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import reproduce_stories260k as script
from medusa.commandline import exit_status


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kinds", "medusa", "hydra+foo"], "'hydra+foo'"),
        (["--kinds", "paper", "hydr"], "'hydr'"),
        (["--prompts", "missing.jsonl"], "no data at missing.jsonl"),
    ],
)
def test_kinds_and_prompts_are_checked_first(
    more: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "run", lambda *_: pytest.fail("trained"))
    reference = tmp_path / "reference.json"
    reference.write_text(json.dumps({"prompts": [[1]], "runs": {"float32": {"new_ids": [[2]]}}}), encoding="utf-8")
    argv = ["--backbone", "b", "--reference", str(reference), "--openings", "t.txt", "--output", str(tmp_path)]
    try:
        status = exit_status("reproduce_stories260k", lambda: script.main([*argv, *more]))
    except SystemExit as exit_:  # argparse's own way
        status = exit_.code
    assert status == 2
    assert message in capsys.readouterr().err
