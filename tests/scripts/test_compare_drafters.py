"""The table of all drafters: a row for each that fits, and a reason for each that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import compare_drafters as script
from medusa.loading import load_backbone
from tests.helpers import random_heads


def test_all_kinds_of_rows_on_the_embedded_backbone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = random_heads(load_backbone("demo").model, 2, lm_head="shared")
    heads.save_pretrained(tmp_path / "heads")
    prompts = [
        {"prompt": f"{start} time there was", "category": kind} for start, kind in (("Once upon a", "a"), ("A", "b"))
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)), encoding="utf-8")
    (tmp_path / "text.txt").write_text("Once upon a time there was a dog. The dog was big.\n" * 3, encoding="utf-8")
    argv = ["--on", "demo", str(tmp_path / "heads"), "--prompts", str(tmp_path / "prompts.jsonl")]
    argv += ["--text", str(tmp_path / "text.txt"), "--tree", "topk:2,1", "--threads", "1", "--max-new-tokens", "6"]
    argv += ["--rounds", "1", "--draws", "300", "--sampled-prompts", "1", "--json", str(tmp_path / "out.json")]
    argv += [
        "--drafters",
        "heads",
        "model:demo",
        "rest",
        f"model:{wrong_vocabulary(tmp_path)}",
        "ngram",
        "mix:heads+ngram",
    ]
    script.main(argv)
    (table,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["tables"]
    rows = table["rows"]
    ours = ["heads", "model:demo", "rest", "ngram", "mix:heads+ngram"]
    assert list(rows) == ["plain", "transformers", "transformers, model:demo", "transformers, ngram", *ours]
    assert all(row["equal_to_plain"] == 1 for row in rows.values())
    for name in ours:
        row = rows[name]
        assert row["draws_pass"]
        assert set(row["by_category"]) == {"a", "b"}
        assert row["tokens_per_second"] > 0
    assert rows["heads"]["megabytes"] == pytest.approx(4 * heads.num_parameters / 1e6)
    assert rows["mix:heads+ngram"]["megabytes"] == rows["heads"]["megabytes"]
    assert 0 < rows["rest"]["megabytes"] < 0.01
    assert [rows[name]["needs"] for name in ours] == [
        "trained heads",
        "a small model",
        "a datastore",
        "nothing",
        "trained heads",
    ]
    (why,) = table["left_out"].values()
    assert "vocabulary" in why or "tokens" in why
    out = capsys.readouterr().out
    assert "left out" in " ".join(out.split())
    assert "yes: 100% of texts equal" in out


def wrong_vocabulary(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "wrong")
    return tmp_path / "wrong"
