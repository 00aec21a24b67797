"""scripts/measure_step.py: it runs, and its figures follow from its measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import measure_step
from medusa import RequestError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scripted_acceptance_on_a_random_llama(dtype: str, tmp_path: Path) -> None:
    """Tau is 2.5: steps of 2 and 3 tokens alternate, also when rounding differs between one token and many."""
    argv = ["--random", "2x64", "--tree", "topk:3,2", "--tau", "2.5", "--max-new-tokens", "41", "--dtype", dtype]
    argv += ["--prompt-tokens", "70", "--piece", "32", "--threads", "1", "--json", str(tmp_path / "out.json")]
    measure_step.main(argv)
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert outcome["tau"] == pytest.approx(2.5, abs=0.05)
    ms = outcome["ms"]
    assert outcome["ratio"] == pytest.approx(ms["step"] / (ms["forward"] + ms["heads"]))
    assert outcome["bound"] == pytest.approx(outcome["tau"] * ms["forward_of_one"] / (ms["forward"] + ms["heads"]))
    assert outcome["prefill"]["tokens"] == 70
    assert outcome["prefill"]["cache_mb"] == pytest.approx(2 * 2 * 70 * 64 * (4 if dtype == "float32" else 2) / 2**20)


def test_the_random_llama_counts() -> None:
    model = measure_step.counting_llama(3, 64)
    with torch.no_grad():
        ids = torch.randint(measure_step.VOCAB, (1, 50))
        assert model(ids).logits.argmax(-1).tolist() == ((ids + 1) % measure_step.VOCAB).tolist()


def test_heads_that_read_guesses_are_refused() -> None:
    with pytest.raises(RequestError, match="of kind markov; take independent ones, such as medusa"):
        measure_step.main(["--backbone", "demo", "--heads", "demo", "--prompts", "demo"])
