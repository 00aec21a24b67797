"""scripts/measure_step.py and measure_batches.py: they run, and their figures follow from what they measured."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


def run(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--threads", "1", "--json", str(file)])
    module = importlib.import_module(name)
    with contextlib.suppress(SystemExit):  # of measure_batches, which says by it whether speculation lost
        module.main()
    return json.loads(file.read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scripted_acceptance_on_a_random_llama(dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """tau 2.5: steps of 2 and 3 tokens in turn, also where rounding differs between one token and many."""
    arguments = ("--random", "2x64", "--tree", "topk:3,2", "--tau", "2.5", "--max-new-tokens", "41", "--dtype", dtype)
    outcome = run("measure_step", monkeypatch, tmp_path, *arguments, "--prompt-tokens", "70", "--piece", "32")
    assert outcome["tau"] == pytest.approx(2.5, abs=0.05)
    ms = outcome["ms"]
    assert outcome["ratio"] == pytest.approx(ms["step"] / (ms["forward"] + ms["heads"]))
    assert outcome["bound"] == pytest.approx(outcome["tau"] * ms["forward_of_one"] / (ms["forward"] + ms["heads"]))
    assert outcome["prefill"]["tokens"] == 70
    assert outcome["prefill"]["cache_mb"] == pytest.approx(2 * 2 * 70 * 64 * (4 if dtype == "float32" else 2) / 2**20)


def test_the_random_llama_counts() -> None:
    module = importlib.import_module("measure_step")
    model = module.counting_llama(3, 64)
    with torch.no_grad():
        ids = torch.randint(module.VOCAB, (1, 50))
        assert model(ids).logits.argmax(-1).tolist() == ((ids + 1) % module.VOCAB).tolist()


@pytest.mark.slow
def test_batches_in_pairs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("decode.bench.calibration.calibrate.SIZES", (1, 4))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\nOne day, a girl\nThe dog\n")
    models = ("--backbone", "demo", "--heads", "demo", "--prompts", str(prompts))
    sizes = ("--batch-sizes", "1", "2", "--pairs", "6", "--max-new-tokens", "16", "--limit", "0")
    outcome = run("measure_batches", monkeypatch, tmp_path, *models, *sizes)
    assert [row["batch_size"] for row in outcome["rows"]] == [1, 2]
    for row in outcome["rows"]:
        assert row["equal_to_plain"] == 1
        assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
        assert row["nodes"] in (1, 4)
