"""scripts/check_calibration.py on the embedded backbone: what it says is what decoding did."""

from __future__ import annotations

import json
from pathlib import Path

import check_calibration as script


def test_tau_predicted_and_measured(tmp_path: Path) -> None:
    for name, texts in (("some", ["Once upon a time", "Tom had a"]), ("others", ["One day, a girl", "The dog was"])):
        lines = [json.dumps({"prompt": text, "category": name}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    argv = ["--backbone", "demo", "--heads", "demo", "--calibrate-on", str(tmp_path / "some.jsonl")]
    argv += ["--prompts", str(tmp_path / "others.jsonl"), "--nodes", "4", "--max-new-tokens", "12"]
    script.main([*argv, "--threads", "1", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [(row["nodes"], row["tree"]) for row in found["rows"]] == [(4, "static"), (4, "dynamic")]
    for row in found["rows"]:
        assert 1 < row["foretold"] <= 5
        assert 1 < row["measured"] <= 5
        assert row["by_category"] == {"others": row["measured"]}
