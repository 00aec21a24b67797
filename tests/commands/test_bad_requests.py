"""Impossible requests print a one-line error without delay, exit status 2, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa.__main__ import main
from medusa.fingerprint import fingerprint
from tests.commands.place import Place, with_template, write_rows
from tests.helpers import HIDDEN, random_heads, tiny_model
from tests.train.templates import GEMMA
from train.features.recorder import Recorder


def generate(place: Place, *argv: Any, **changes: Any) -> tuple[Any, ...]:
    """A valid `medusa generate` with one change."""
    given = {"--backbone": place.backbone, "--heads": place.heads, "--prompt": "abc"} | changes
    return ("generate", *(word for pair in given.items() for word in pair if pair[1] is not None), *argv)


# --- seen before anything is loaded ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_loading")
def test_an_amateur_of_another_tokenizer(refused: Any, place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place.backbone, other)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"c": 2', '"ß": 2'), encoding="utf-8")
    said = refused(*generate(place, "--amateur", other))
    assert f"the amateur {other} has another tokenizer: 'c' is 2 in {place.backbone} and nothing in {other}" in said
    measure = ("benchmark", *place.models, "--prompts", place.prompts)
    assert "cannot be combined with --amateur" in refused(
        *measure, "--amateur", place.backbone, "--against", "prompt-lookup"
    )
    assert f"the draft model {other} has another tokenizer" in refused(*measure, "--against", f"model:{other}")
    assert "the draft model demo has 4096 tokens" in refused(*measure, "--against", "model:demo")


def test_a_heading_of_transformers_is_followed_by_its_reason(refused: Any, place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.backbone, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": "wide"}), encoding="utf-8")
    said = refused(*generate(place, **{"--backbone": str(tmp_path)}))
    assert "Validation error for field 'hidden_size': TypeError: Field 'hidden_size' expected int, got str" in said


@pytest.mark.parametrize(
    ("backbone", "against", "said"),
    [
        ("qwen3_5_text", "prompt-lookup", "takes no recurrent layers, and the backbone has some; leave out --against"),
        ("llama", "mamba", "takes no recurrent layers, and the draft model"),
        ("llama", "gpt2", "reads 24 tokens, and prompts and answers have up to"),
    ],
)
def test_assisted_generation_that_transformers_does_not_do(
    refused: Any, place: Place, tmp_path: Path, backbone: str, against: str, said: str
) -> None:
    """Before anything is measured: an error in the middle would lose all figures."""
    shutil.copytree(place.backbone, tmp_path / "backbone")
    tiny_model(backbone).save_pretrained(tmp_path / "backbone")
    if against != "prompt-lookup":
        shutil.copytree(place.backbone, tmp_path / "small")
        tiny_model(against, **({"max_position_embeddings": 24} if against == "gpt2" else {})).save_pretrained(
            tmp_path / "small"
        )
        against = f"model:{tmp_path / 'small'}"
    measure = ("benchmark", "--backbone", tmp_path / "backbone", "--drafter", "ngram", "--prompts", place.prompts)
    assert said in refused(*measure, "--max-new-tokens", "24", "--against", against)


# --- trees and heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "said"), [({"hidden_size": 16}, ("hidden size 16", "32")), ({"vocab_size": 50}, ("50", "61"))]
)
def test_heads_of_another_size(
    refused: Any, place: Place, tmp_path: Path, sizes: dict[str, int], said: tuple[str, str]
) -> None:
    random_heads(tiny_model("llama", **sizes)).save_pretrained(tmp_path)
    line = refused(*generate(place, **{"--heads": str(tmp_path)}))
    assert all(word in line for word in said)


def test_ids_beyond_the_vocabulary(refused: Any, place: Place, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 61]}', encoding="utf-8")
    assert "61" in refused(*generate(place, "--prompts", tmp_path / "ids.jsonl", **{"--prompt": None}))


def test_misplaced_recordings_are_rejected(
    refused: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fingerprint(tiny_model("llama", seed=99), "other")
    recorder = Recorder(tmp_path / "theirs", other, HIDDEN, torch.float32)
    recorder.add([1, 2], torch.zeros(2, HIDDEN))
    recorder.flush()
    said = refused(*generate(place, "--record", str(tmp_path / "theirs")))
    assert "theirs holds features of another backbone or dtype" in said
    assert "give another folder" in said
    monkeypatch.setattr("train.features.recorder.free_bytes", lambda path: 1000)
    said = refused(*generate(place, "--record", str(tmp_path / "new")))
    assert "where 1 kB are free" in said
    assert "fewer new tokens" in said
    assert not (tmp_path / "new").exists()


def test_text_for_a_backbone_without_tokenizer(refused: Any, place: Place) -> None:
    assert "input_ids" in refused(*generate(place, **{"--backbone": place.bare}))


# --- damaged files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(place: Place, tmp_path: Path) -> Path:
    """A copy of the backbone that may be damaged."""
    return Path(shutil.copytree(place.backbone, tmp_path / "backbone"))


@pytest.mark.parametrize(
    ("name", "kept"),
    [("model.safetensors", 0.5), ("model.safetensors", 0), ("config.json", 0.5), ("tokenizer.json", 0)],
)
def test_a_damaged_backbone(refused: Any, place: Place, copied: Path, name: str, kept: float) -> None:
    """Files that are cut; those of heads are tested with checkpoints."""
    content = (copied / name).read_bytes()
    (copied / name).write_bytes(content[: int(kept * len(content))])
    assert str(copied) in refused(*generate(place, **{"--backbone": str(copied)}))


def test_a_backbone_with_a_missing_tensor_is_rejected(refused: Any, place: Place, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.0.mlp.up_proj.weight" in refused(*generate(place, **{"--backbone": str(copied)}))


# --- training and distillation ---------------------------------------------------------------------------------------


@pytest.fixture
def recipe(place: Place, tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        content = {"backbone": place.backbone, "data": place.prompts, "output_dir": str(tmp_path / "out")} | changes
        (tmp_path / "recipe.yaml").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path / "recipe.yaml"

    return write


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "d.jsonl:2: a conversation needs a chat template"),
        ('{"input_ids": [1, 2, 99]}', "d.jsonl:2: the id 99"),
        ('{"text": 5}', "d.jsonl:2: text is 5; it must be a text"),
    ],
)
def test_unusable_training_data_is_rejected(refused: Any, recipe: Any, tmp_path: Path, row: str, said: str) -> None:
    """The error names file, line and remedy; `--inspect` finds the same errors as training."""
    (tmp_path / "d.jsonl").write_text('{"text": "abc"}\n' + row + "\n", encoding="utf-8")
    for inspect in ((), ("--inspect",))[: 2 if "id 99" in said else 1]:
        assert said in refused("train", recipe(data=str(tmp_path / "d.jsonl")), "--quiet", *inspect)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": ""}\n', "dropped: 1 empty (first: "),
        (
            '{"input_ids": [1, 2], "prompt_tokens": 2}\n',
            "d.jsonl:1); heads learn from texts and from what an assistant says",
        ),
    ],
)
def test_empty_training_data_is_rejected(refused: Any, recipe: Any, tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "d.jsonl").write_text(content, encoding="utf-8")
    assert said in refused("train", recipe(data=str(tmp_path / "d.jsonl")), "--quiet")


@pytest.fixture
def gemma(place: Place, tmp_path: Path) -> str:
    """The backbone with a chat template that rejects system messages."""
    return with_template(place.backbone, GEMMA, tmp_path / "gemma")


def test_roles_the_chat_template_rejects(refused: Any, recipe: Any, gemma: str, tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    rows = [[user, {"role": "assistant", "content": "b"}], [{"role": "system", "content": "a"}, user]]
    path = write_rows(tmp_path / "d.jsonl", [{"messages": row} for row in rows])
    for argv in (
        ("train", recipe(backbone=gemma, data=str(path)), "--quiet"),
        ("distill", "--backbone", gemma, "--prompts", path, "--output", tmp_path / "own.jsonl", "--quiet"),
    ):
        line = refused(*argv)
        assert "d.jsonl:2: the chat template refuses the messages (System role not supported)" in line
        assert "roles are system, user" in line
        assert "leave out this record" in line


def test_a_file_without_an_answer_of_an_assistant(refused: Any, recipe: Any, gemma: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n', encoding="utf-8")
    line = refused("train", recipe(backbone=gemma, data=str(path)), "--quiet")
    assert "nothing to train on in" in line
    assert "1 without an assistant turn (first: " in line
    assert "d.jsonl:1)" in line


# --- datastores ------------------------------------------------------------------------------------------------------


def test_a_datastore_of_another_tokenizer(refused: Any, place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place.backbone, other)
    changed = (other / "tokenizer.json").read_text(encoding="utf-8").replace('"a": 0', '"~": 0')
    (other / "tokenizer.json").write_text(changed.replace('"unk_token": "a"', '"unk_token": "~"'), encoding="utf-8")
    store, text = tmp_path / "store", tmp_path / "text.txt"
    text.write_text("bcdbcd", encoding="utf-8")
    assert main(["datastore", "build", "--backbone", place.backbone, "--data", str(text), "--output", str(store)]) == 0
    said = refused("generate", "--backbone", other, "--drafter", f"rest:{store}", "--prompt", "bcd")
    assert f"was built with the tokenizer of {place.backbone}" in said
    assert f"and {other} has another one" in said
    again = refused("datastore", "build", "--backbone", place.backbone, "--data", text, "--output", store)
    assert "store exists already; choose another place or add --overwrite" in again
