"""scripts/real_model.py: all stages on the embedded model, each done once, and the report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import real_model
from decode.bench.calibration import calibrate, stored, variants
from medusa.commands.fit import plan, probe
from medusa.errors import RequestError
from medusa.files import ASSETS
from medusa.loading import load_tokenizer
from medusa.records.record import Record
from real_measure import SETS, lengthened
from tests.helpers import times_of_few_steps

KINDS = ["markov", "eagle"]
TINY = real_model.Sizes((0.01, 0.01), 16, (1, 4), (8,), (1, 4, 1), (1, 60), (8, 12), (2, 4, 1), 512)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make probe and calibration short: no figure of these tests is a measurement."""
    few: dict[Any, dict[str, Any]] = {
        real_model: {"QUICK": TINY, "TEMPERATURES": (1.0,)},
        plan: {"FEWEST_TEXTS": 12},
        probe: {"ANSWERED": 4, "READ": 2, "ROWS": 1, "LENGTH": 64, "STEPS": 1},
        stored: {"MIN_STEPS": 60},
        calibrate: {"MIN_STEPS": 60, "SIZES": (1, 4), "time_steps": times_of_few_steps},
        variants: {"SHORTLISTS": (16,)},
    }
    for module, values in few.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)


@pytest.fixture
def data(tmp_path: Path, short: None) -> Path:
    openings = [json.loads(line)["prompt"] for line in (ASSETS / "openings.jsonl").read_text().splitlines()]
    for place, (folder, aside) in enumerate(SETS.values()):
        (tmp_path / folder).mkdir()
        prompts = [f"{text} {place}" for text in openings[: aside + 40 * (folder != "mt_bench")]]
        lines = [json.dumps({"turns": [text, "Go on."]} if not place else {"question": text}) for text in prompts]
        (tmp_path / folder / "x.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def command(data: Path) -> list[str]:
    words = ["demo", "--data", str(data), "--output", str(data / "out"), "--quick", "--dtypes", "float32"]
    return [*words, "--kinds", ",".join(KINDS)]


@pytest.mark.full
def test_a_stage_that_others_need_must_be_asked_for(
    command: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other stages run with `--full`."""
    command[-1] = "markov"
    with pytest.raises(RequestError, match="stage calibrate markov float32 is not finished, and others need it"):
        real_model.main([*command, "--only", "text", "train"])
    assert "text ..." in capsys.readouterr().err
    stages = json.loads((data / "out" / "fit.json").read_text())["stages"]
    assert {*stages} == {"plan", "text", "train markov"}
    assert stages["text"]["texts"] > 0
    with pytest.raises(RequestError, match="--minutes-of-text"):
        real_model.main([*command, "--minutes-of-text", "1"])


@pytest.mark.full
@pytest.mark.usefixtures("one_tree_check")
def test_every_stage_runs_once_and_is_reported(
    command: list[str], data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real_model.main(command)
    page = capsys.readouterr().out
    content = json.loads((data / "out" / "fit.json").read_text())
    stages = content["stages"]
    each = {f"{stage} {kind}" for stage in ("train", "tau") for kind in KINDS}
    assert {"text", "engine", "speed float32 1 0.0", "speed float32 1 1.0", "long"} | each <= {*stages}
    assert all(its["equal_to_plain"] == 1 for its in stages["speed float32 1 0.0"]["methods"].values())
    assert {"plain", "transformers", "prompt lookup", "n-grams", *KINDS} <= {*stages["speed float32 1 0.0"]["methods"]}
    assert all(its["equal_to_plain"] == 1 for its in stages["long"]["methods"].values())
    assert all(1 <= its["8"][0] <= 8 for its in stages[f"tau {KINDS[-1]}"]["tau"].values())
    for title in (
        "The plan, and what happened",
        "Speed in float32, 1 thread, temperature 0",
        "Speed after prompts of 60 tokens",
        "tau by training",
        "Text",
    ):
        assert f"## {title}" in page
    assert (data / "out" / "curve.png").stat().st_size > 1000
    real_model.main(command)
    assert capsys.readouterr().err == ""
    assert json.loads((data / "out" / "fit.json").read_text())["stages"] == stages


def test_an_interrupted_stage_keeps_its_time(command: list[str], data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `--only text` asks for nothing else."""
    args = [*command, "--only", "text"]
    kept = data / "out" / "fit.json"

    def stop(run: Any) -> None:
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(real_model.RealModel, "text", stop)
    with pytest.raises(KeyboardInterrupt):
        real_model.main(args)
    _, spent = json.loads(kept.read_text())["unfinished"]["text"]
    assert spent >= 0.2
    monkeypatch.setattr(real_model.RealModel, "text", lambda run: {"texts": 1, "tokens": 1, "resumed": True})
    real_model.main(args)
    content = json.loads(kept.read_text())
    assert content["stages"]["text"]["seconds"] >= spent
    assert {*content["stages"]} == {"plan", "text"}
    assert not content["unfinished"]


def test_long_prompts_are_questions_after_other_texts(tmp_path: Path) -> None:
    """Each has enough tokens before it, of texts that no neighbour has; begun again when all have been used."""
    tokenizer, texts = load_tokenizer("demo"), ["Tom had a red ball.", "The sun was hot.", "Run."]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    lines = [json.dumps({"input_ids": its, "prompt_tokens": 2}) for its in ids]
    (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
    asked = [Record("here", text=f"Why {n}?", is_prompt=True, category="c") for n in range(2)]
    found = lengthened(asked, tmp_path / "text.jsonl", tokenizer, len(ids[0]) + 1)
    assert [its.question for its in found] == [
        f"{texts[0]}\n\n{texts[1]}\n\nWhy 0?",
        f"{texts[2]}\n\n{texts[0]}\n\nWhy 1?",
    ]
    assert {its.category for its in found} == {"c"}


def test_kinds_come_with_settings() -> None:
    assert real_model.kind_and_settings("markov") == ("markov", {})
    assert real_model.kind_and_settings("dflash:edges=none:layers=2") == ("dflash", {"edges": "none", "layers": 2})
    for wrong, told in (
        ("dfash", "dflash"),
        ("dflash:edges", "KIND:KEY=VALUE"),
        ("dflash:=2", "KIND:KEY=VALUE"),
        ("dflash:edgs=none", "unknown key heads.edgs"),
    ):
        with pytest.raises(RequestError, match=told):
            real_model.kind_and_settings(wrong)
