"""scripts/check_calibration.py on the embedded backbone: what it says is what decoding did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """The script with few prompts and few tokens -> its JSON."""
    for name, texts in (("some", ["Once upon a time", "Tom had a"]), ("others", ["One day, a girl", "The dog was"])):
        lines = [json.dumps({"prompt": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def call(*more: str) -> dict[str, Any]:
        command = [sys.executable, "scripts/check_calibration.py", "--backbone", "demo", "--heads", "demo"]
        command += ["--calibrate-on", str(tmp_path / "some.jsonl"), "--prompts", str(tmp_path / "others.jsonl")]
        command += ["--nodes", "4", "--max-new-tokens", "12", "--threads", "1", "--json", str(tmp_path / "out.json")]
        done = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))

    return call


def test_tau_predicted_and_measured(run: Any) -> None:
    found = run()
    assert [(row["nodes"], row["tree"]) for row in found["rows"]] == [(4, "static"), (4, "dynamic")]
    for row in found["rows"]:
        assert 1 < row["foretold"] <= 5
        assert 1 < row["measured"] <= 5
        assert list(row["by_category"].values()) == [row["measured"]]


def test_speeds_of_all_trees(run: Any) -> None:
    found = run("--speed", "1")
    assert set(found["tokens_per_second"]) == {"picked", "plain", "static 4", "dynamic 4"}
    assert all(speed > 0 for speed in found["tokens_per_second"].values())
