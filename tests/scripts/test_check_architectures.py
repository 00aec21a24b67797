"""scripts/check_architectures.py: correct rows pass, wrong rows are reported, and the page contains the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import check_architectures as script
from decode import reader
from medusa.errors import RequestError
from tests.helpers import FIRST_TRANSFORMERS, random_ids, rename_attention, tiny_model
from tiny_models import MULTIMODAL, SUPPORTED

FEW = (5, 40)  # two of the script's prompts: within windows at first, and beyond them and the limit of longrope
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.fixture(autouse=True)
def short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "PROMPTS", FEW)
    monkeypatch.setattr(script, "NEW", 8)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma2", "phi3, longrope"])
def test_a_supported_row(name: str) -> None:
    row = script.check_supported(name)
    assert row.as_expected
    assert list(row.checks) == (["eager"] if name in WITHOUT_SDPA else ["sdpa", "eager"])
    assert all(set(checks) == {"float32", "bfloat16", "float16"} for checks in row.checks.values())
    cells = row.cells()
    assert len(cells) == len(script.SUPPORTED_COLUMNS)
    assert float(cells[-1]) > 1.2, "the texts are the same, so nothing follows tau"


OWN_WAYS = ("mixtral", "phimoe, longrope", "gemma3n_text", "gemma4_text", "gptj", "gpt_bigcode", "gpt_oss", "minicpm3")
WITHOUT_SDPA = ("gptj", "gpt_oss") if FIRST_TRANSFORMERS else ("gemma2", "gptj", "gpt_oss")


def later(name: str, attention: str) -> bool:
    """Whether a row runs weekly: the second attention, and all rows but those that meet code of ours that the models
    of tests/test_lossless.py do not meet."""
    return name not in OWN_WAYS or (attention == "eager" and name not in WITHOUT_SDPA)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        pytest.param(name, attention, marks=[pytest.mark.full] * later(name, attention))
        for name in SUPPORTED
        for attention in script.ATTENTIONS
    ],
)
def test_every_supported_model_writes_the_text_of_generate(name: str, attention: str) -> None:
    """Alone and in a ragged batch; a model may compare the name of its attention."""
    model = script.offered(name, attn_implementation=attention)
    assert (model is None) == (attention == "sdpa" and name in WITHOUT_SDPA)
    if model is not None:
        same, tau = script.compare_texts(model)
        assert same
        assert tau > 1.1, "hardly any guess was accepted: no power"
        with torch.no_grad():
            varied = model(torch.tensor([random_ids(9)])).logits.argmax(-1).unique().numel()
        assert varied > 2, "a model that repeats one token would write the same text with any mask"


def test_texts_that_differ_from_generate_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rename_attention(monkeypatch)
    monkeypatch.setattr("decode.texts.require_tree_forward", lambda model: None)  # or decoding would refuse
    assert not script.compare_texts(tiny_model("falcon, rope"))[0]
    assert script.compare_texts(tiny_model("llama"))[0], "a Llama takes any name"


@pytest.mark.parametrize("name", ["mpt", "recurrent_gemma", "t5"])
def test_a_rejected_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = script.check_refused(name)
    assert row.as_expected
    cells = row.cells()
    assert len(cells) == len(script.REFUSED_COLUMNS)
    assert cells[-1].startswith("not run" if name == "t5" else "a tree forward ")
    monkeypatch.setattr(script, "require_tree_support", lambda model: None)
    row = script.check_refused(name)
    assert not row.as_expected
    assert "NOT REFUSED" in row.cells()


def test_a_wrong_mask_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """With all nodes visible, the text differs, errors exceed the limit, and the exit status is 1."""
    by_slot = reader.by_slot
    monkeypatch.setattr(reader, "by_slot", lambda *nodes: (by_slot(*nodes)[0] | True, *by_slot(*nodes)[1:]))
    monkeypatch.setattr("decode.texts.require_tree_forward", lambda model: None)  # or decoding would refuse
    assert script.main(["--only", "llama"]) == 1
    shown = capsys.readouterr()
    assert "FAILS" in shown.out
    assert "DIFFERS" in shown.out
    assert "not as expected: llama" in shown.err


def test_a_row_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert script.main(["--only", "opt", "bloom", "--json", str(tmp_path / "out.json")]) == 0
    assert "opt" in capsys.readouterr().out
    told = json.loads((tmp_path / "out.json").read_text())
    opt, bloom = told["rows"]
    assert [*opt["checks"]] == [*script.ATTENTIONS]
    assert all({*checks} == {*script.CHECKED} for checks in opt["checks"].values())
    assert opt["tau"] > 1.2, "the texts are the same, so nothing follows tau"
    assert (opt["name"], opt["model"], opt["same"]) == ("opt", "OPTForCausalLM", {"sdpa": True, "eager": True})
    assert opt["checks"]["sdpa"]["float32"]["error"] < 1e-5
    assert "ALiBi" in bloom["refusal"]
    assert torch.__version__ in told["versions"]


def test_a_model_given_by_the_user(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert script.main(["--backbone", "demo", "--json", str(tmp_path / "out.json")]) == 0
    assert "can hold a tree" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["error"] < 1e-5
    tiny_model("gpt_neo").save_pretrained(tmp_path / "neo")
    with pytest.raises(RequestError, match="GPTNeoForCausalLM"):
        script.main(["--backbone", str(tmp_path / "neo")])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "lama"], "lama"),
        (["--only", "llama", "--write", "page.md"], "--only"),
        (["--backbone", "./no/such/folder"], "./no/such/folder"),
    ],
)
def test_wrong_requests(arguments: list[str], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        script.main(arguments)


def test_the_table_is_written_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{script.BEGIN}\nold\n{script.END}\n\nafter\n")
    row = script.Row("bloom", "BloomForCausalLM", refusal="reasons")
    for _ in range(2):
        script.write_page(page, [row])
        text = page.read_text()
        assert text.startswith(f"before\n\n{script.BEGIN}\n")
        assert text.endswith(f"{script.END}\n\nafter\n")
        assert text.count("| bloom | BloomForCausalLM | reasons | not run |") == 1
        assert "old" not in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        script.write_page(page, [row])
    assert page.read_text() == "no marks"


def test_the_page_holds_every_row_of_the_script_and_no_other() -> None:
    table = PAGE.read_text(encoding="utf-8").partition(script.BEGIN)[2].partition(script.END)[0]
    tables = [name for name in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE) if name != "model"]
    supported = re.sub(r"\s+", " ", table.partition("### Supported")[2].partition(".")[0]).strip().split("; ")
    assert [*supported, *tables] == [*SUPPORTED, *MULTIMODAL, *script.RECURRENT, *script.REFUSED]
    assert "FAILS" not in table
    assert "DIFFERS" not in table
    assert "NOT REFUSED" not in table


def test_windows_and_chunks_are_shorter_than_the_prompts() -> None:
    """Otherwise the rows about windows would test nothing."""
    for name in ("mistral, window", "gemma3_text", "llama4_text"):
        config = tiny_model(name).config
        assert (getattr(config, "sliding_window", None) or config.attention_chunk_size) < max(script.PROMPTS)
