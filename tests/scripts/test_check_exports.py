"""scripts/check_exports.py: other tools load our exports, if they are installed."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import check_exports as script
from tests.helpers import random_heads, tiny_model

# Without medusa-llm, which cannot be installed together with this package.
INSTALLED = {
    "vllm": "vllm",
    "vllm-eagle3": "vllm",
}


@pytest.fixture(params=["medusa", "eagle"])
def exports(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "backbone")
    gated = {"kind": "eagle", "block": "gated", "lm_head": "shared"}
    heads = random_heads(model, **(gated if request.param == "eagle" else {}))
    heads.save_pretrained(tmp_path / "heads")
    output = tmp_path / "exports"
    script.write(Namespace(heads=str(tmp_path / "heads"), backbone=str(tmp_path / "backbone"), output=output))
    return output


def test_expected_logits_are_written_with_the_exports(exports: Path) -> None:
    said = load_file(exports / script.EXPECTED)
    independent = (exports / "tgi").is_dir()
    assert ("logits" in said) == independent
    assert sorted(path.name for path in exports.iterdir() if path.is_dir()) == (
        ["original-v1", "tgi", "vllm"] if independent else ["sglang", "vllm"]
    )


@pytest.mark.parametrize("consumer", INSTALLED)
def test_an_installed_server_loads_the_exports(exports: Path, consumer: str) -> None:
    if importlib.util.find_spec(INSTALLED[consumer]) is None:
        pytest.skip(f"needs {INSTALLED[consumer]}")
    if (consumer == "vllm-eagle3") == (exports / "tgi").is_dir():
        pytest.skip("other heads")
    assert script.check(consumer, exports)


def test_wrong_logits_fail(exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (exports / "tgi").is_dir():
        pytest.skip("heads without logits to compare")
    logits = load_file(exports / script.EXPECTED)["logits"]
    monkeypatch.setitem(script.CONSUMERS, "vllm", lambda folder: (logits, "vllm"))
    assert "largest difference 0.0e+00" in script.check("vllm", exports)
    save_file({"logits": logits.flip(0).contiguous()}, exports / script.EXPECTED)
    with pytest.raises(AssertionError):
        script.check("vllm", exports)
    assert torch.isfinite(logits).all()
