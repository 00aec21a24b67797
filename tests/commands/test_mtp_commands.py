"""Every command that decodes, with the MTP layer of a tiny random model: as it is, and as heads of kind `mtp`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from starlette.applications import Starlette
from starlette.testclient import TestClient
from transformers import AutoModelForCausalLM

from decode.bench.calibration import calibrate
from decode.bench.calibration.stored import heads_fingerprint
from decode.serve import app as serving
from medusa.native_layers import native_heads
from medusa.tree import Tree
from tests.commands.place import Outcome, write_rows
from tests.helpers import LETTERS, VOCAB, plain
from tests.native_models import save_native
from tiny_models import letter_tokenizer

PROMPTS = [LETTERS[at : at + 3] for at in range(8)]
NEW = 8
SHORT = ("--max-new-tokens", str(NEW), "--threads", "1")
GENERATION = (*SHORT, "--ignore-eos")
NATIVE, TUNED = "the model's own layer", "heads of kind mtp"


class Native(NamedTuple):
    """The files on disk, and the greedy continuation of the first prompt."""

    models: dict[str, tuple[str, ...]]
    """The arguments that choose the models and a tree."""
    prompts: str
    text: str
    model: Any


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    folder = tmp_path_factory.mktemp("native")
    save_native("deepseek_v3", folder / "backbone")
    letter_tokenizer(VOCAB - 2, VOCAB - 1).save_pretrained(folder / "backbone")
    model = AutoModelForCausalLM.from_pretrained(folder / "backbone").eval()
    heads = native_heads(model, 3)
    heads.config.tree = Tree.chain(3).to_json()
    heads.save_pretrained(folder / "heads")
    prompts = write_rows(folder / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    ids = plain(model, [LETTERS.index(letter) for letter in PROMPTS[0]], max_new_tokens=NEW)
    models = {
        NATIVE: ("--backbone", str(folder / "backbone"), "--drafter", "mtp", "--tree", "chain"),
        TUNED: ("--heads", str(folder / "heads")),
    }
    return Native(models, str(prompts), "".join(LETTERS[token] for token in ids), model)


@pytest.fixture
def said(medusa: Callable[..., Outcome]) -> Callable[..., str]:
    """Run the command, and return what it printed on standard output."""

    def run(*argv: object) -> str:
        done = medusa(*argv)
        assert done.status == 0, done.err
        return done.out

    return run


IN_BOTH_PLACES = pytest.mark.parametrize("models", [NATIVE, pytest.param(TUNED, marks=pytest.mark.full)])


@IN_BOTH_PLACES
def test_generate_chat_and_serve(said: Any, native: Native, monkeypatch: pytest.MonkeyPatch, models: str) -> None:
    """All three write the model's own text."""
    chosen, replies = (*native.models[models], *GENERATION), []
    assert said("generate", *chosen, "--prompt", PROMPTS[0]) == native.text + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPTS[0] + "\n"))
    assert said("chat", *chosen) == native.text + "\n"

    def answer(app: Starlette, *listening: object) -> None:
        client = TestClient(app, base_url="http://127.0.0.1")
        replies.append(client.post("/v1/completions", json={"prompt": PROMPTS[0], "temperature": 0}).json())

    monkeypatch.setattr(serving, "serve", answer)
    said("serve", *chosen, "--quiet")
    assert replies[0]["choices"][0]["text"] == native.text


@pytest.mark.full
def test_verify_and_benchmark(said: Any, native: Native, tmp_path: Path) -> None:
    chosen = (*native.models[NATIVE], "--prompts", native.prompts, "--quiet", "--max-prompts")
    said("verify", *chosen, "1", *SHORT, "--draws", "200", "--json", tmp_path / "verified.json")
    assert json.loads((tmp_path / "verified.json").read_text())["passed"] is True
    measured = tmp_path / "measured.json"
    said("benchmark", *chosen, "2", *GENERATION, "--rounds", "1", "--json", measured)
    assert json.loads(measured.read_text())["methods"]["medusa"]["equal_to_plain"] == 1


def test_evaluate_gives_the_same_for_the_layer_in_both_places(said: Any, native: Native, tmp_path: Path) -> None:
    found = []
    for models in (native.models[TUNED], native.models[NATIVE][:-2]):  # without --tree
        out = tmp_path / "out.json"
        said("evaluate", *models, "--data", native.prompts, "--max-prompts", "2", *SHORT, "--quiet", "--json", out)
        found.append(json.loads(out.read_text()))
    assert [head["head"] for head in found[0]["heads"]] == [1, 2, 3]
    assert found[0] == found[1]


@pytest.mark.usefixtures("short_calibrations")
@IN_BOTH_PLACES
def test_a_calibrated_layer_needs_no_further_calibration(
    said: Any, native: Native, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: str
) -> None:
    """`auto` then takes the tree that was saved: in the heads' folder, or in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = native.models[models][:4]  # without --tree
    longer = ("--prompts", native.prompts, "--max-new-tokens", "12", "--ignore-eos", "--rounds", "1")
    out = tmp_path / "out.json"
    said("calibrate", *chosen, *longer, "--threads", "1", "--quiet", "--json", out)
    found = json.loads(out.read_text())
    assert max(len(path) for point in found["points"] for path in point["paths"]) <= 3
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **kwargs: pytest.fail("calibrated again"))
    asked = (*GENERATION, "--prompt", PROMPTS[0], "--tree", "auto", "--quiet", "--json", out)
    said("generate", *chosen, *asked)
    best = found["points"][found["chosen"]]
    assert json.loads(out.read_text())["settings"]["nodes"] == best["nodes"]


def test_a_calibration_holds_for_a_number_of_steps(native: Native) -> None:
    """The heads share their weights, but a tree that was chosen for five does not fit three."""
    three, again, five = (heads_fingerprint(native_heads(native.model, number)) for number in (3, 3, 5))
    assert three == again != five
