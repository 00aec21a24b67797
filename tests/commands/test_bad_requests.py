"""Impossible requests print a one-line error without delay, exit status 2, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from medusa.__main__ import main
from medusa.fingerprint import fingerprint
from tests.commands.test_cli import Place, build
from tests.helpers import HIDDEN, random_heads, tiny_model
from tests.train.templates import GEMMA
from train.features.recorder import Recorder

Argv = list[str]


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return build(tmp_path_factory.mktemp("place"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a request in this process; gives its one-line error."""

    def run(*argv: Any) -> str:
        capsys.readouterr()
        status = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert status == 2, err
        assert out == ""
        lines = err.splitlines()
        assert len(lines) == 1, err
        assert lines[0].startswith(f"medusa {argv[0]}: error: "), err
        return lines[0]

    return run


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading large weights takes minutes, so these requests must be rejected before loading."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("a backbone was loaded"))


def generate(place: Place, *argv: Any, **changes: Any) -> tuple[Any, ...]:
    """A valid `medusa generate` with one change."""
    given = {"--backbone": place.backbone, "--heads": place.heads, "--prompt": "abc"} | changes
    return ("generate", *(word for pair in given.items() for word in pair if pair[1] is not None), *argv)


# --- seen before anything is loaded ----------------------------------------------------------------------------------


OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    # what is asked for in vain: the options, and what the message must hold
    "negative temperature": (("--temperature", "-1"), "temperature is -1"),
    "nothing new": (("--max-new-tokens", "0"), "max-new-tokens is 0"),
    "top-p above 1": (("--top-p", "2"), "top-p is 2"),
    "negative top-k": (("--top-k", "-3"), "top-k is -3"),
    "no repetition penalty": (("--repetition-penalty", "0"), "repetition-penalty is 0"),
    "unknown acceptance": (("--acceptance", "hopeful"), "greedy, rejection, typical"),
    "typical without temperature": (("--acceptance", "typical"), "temperature above 0"),
    "min-p above 1": (("--min-p", "1.5"), "min-p is 1.5"),
    "a lossy rule without its number": (("--acceptance", "topk"), "as in topk:2"),
    "a greedy rule with a temperature": (("--temperature", "1", "--acceptance", "topk:2"), "draws nothing"),
    "a lossy rule, compiled": (("--acceptance", "distance:3", "--compile"), "cannot be compiled"),
    "an unknown draft": (("--temperature", "1", "--draft", "guess"), "topk, sample"),
    "a drawn dynamic tree": (("--temperature", "1", "--draft", "sample", "--tree", "dynamic:8"), "use draft topk"),
    "a sampled draft without temperature": (("--draft", "sample"), "temperature above 0"),
    "epsilon out of range": (("--temperature", "1", "--acceptance", "typical", "--epsilon", "1.5"), "epsilon is 1.5"),
    "delta out of range": (("--temperature", "1", "--acceptance", "typical", "--delta", "-1"), "delta is -1"),
    "stopping out of range": (("--stop-drafting", "-1", "--tree", "dynamic:8"), "stop-drafting is -1"),
    "stopping a tree that stays": (("--stop-drafting", "0.1", "--tree", "chain"), "use tree dynamic:N"),
    "stopping compiled steps": (("--stop-drafting", "0.1", "--tree", "dynamic:8", "--compile"), "leave one out"),
    "empty stop string": (("--stop", ""), "stop string is empty"),
    "empty prompt": (("--prompt", ""), "prompt is empty"),
    "missing prompts": (("--prompts", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
    "missing folder for results": (("--json", "/no/such/folder/out.json"), "/no/such/folder/out.json"),
    "a folder for results": (("--json", "tests"), "tests"),
    "unknown dtype": (("--dtype", "float8"), "float32, bfloat16"),
    "unknown device": (("--device", "abacus"), "cpu, cuda"),
    "unknown tree": (("--tree", "oak"), "no tree 'oak'"),
    "a missing tree file": (("--tree", "/no/such/tree.json"), "/no/such/tree.json"),
    "a tree name of 5,000 characters": (("--tree", "x" * 5000), "has 5000 characters"),
    "prompts of 5,000 characters": (("--prompts", "x" * 5000), "more than the name of a file may have"),
    "a tree of 5,000 digits": (("--tree", "dynamic:" + "9" * 5000), "9 ... 9"),
    "a tree of no width": (("--tree", "topk:0"), "width"),
    "an unknown drafter": (
        ("--drafter", "oracle"),
        "choose one of heads, blockwise, mtp, model, ngram, rest, lookahead, mix",
    ),
    "an unknown option of a drafter": (("--drafter", "ngram:size=3"), "no option 'size=3'"),
    "no datastore": (("--drafter", "rest:/no/such/folder"), "no datastore at /no/such/folder"),
    "a model without an MTP layer": (("--drafter", "mtp"), "has no MTP layers"),
    "an MTP layer for nothing": (("--drafter", "mtp:0"), "tokens is 0; it must be at least 1"),
    "another drafter, compiled": (("--drafter", "ngram", "--compile"), "cannot be compiled"),
    "another drafter that stops": (("--drafter", "ngram", "--stop-drafting", "0.1"), "dynamic trees of heads"),
    "a tree for a drafter without heads": (("--drafter", "ngram", "--tree", "chain"), "leave it out"),
    "a tree for blockwise": (("--drafter", "blockwise", "--tree", "chain"), "leave it out"),
    "blockwise beyond the heads": (("--drafter", "blockwise:tokens=99"), "tokens is 99, but there are"),
    "a mix of one": (("--drafter", "mix:heads"), "join several by +"),
    "a mix, drawn": (("--drafter", "mix:heads+ngram", "--temperature", "1", "--draft", "sample"), "use --draft topk"),
    "a mix, compiled": (("--drafter", "mix:heads+ngram", "--compile"), "cannot be compiled"),
    "a tree of words": (("--tree", "topk:many"), "whole numbers"),
    "no such amateur": (("--amateur", "/no/such/folder"), "/no/such/folder"),
    "an amateur of another vocabulary": (("--amateur", "demo"), "the amateur demo has 4096 tokens and the backbone 61"),
    "nobody to contrast with": (("--contrast-alpha", "0.2"), "--contrast-alpha belongs to contrastive decoding"),
    "a constant at its default without an amateur": (
        ("--contrast-alpha", "0.1"),
        "--contrast-alpha belongs to contrastive decoding",
    ),
    "implausible": (("--amateur", "demo", "--contrast-alpha", "2"), "contrast-alpha is 2.0; it must be between 0"),
    "a contrast upside down": (("--amateur", "demo", "--contrast-beta", "-1"), "contrast-beta is -1.0"),
    "an amateur of ice": (("--amateur", "demo", "--amateur-temperature", "0"), "amateur-temperature is 0.0"),
    "beams with heads": (
        ("--strategy", "beam"),
        "--strategy beam searches for the most probable text; leave out --heads",
    ),
    "beams of nothing": (("--num-beams", "3"), "add --strategy beam or best-first-beam"),
    "beams at their default of nothing": (("--num-beams", "4"), "--num-beams belongs to beam search"),
    "no penalty for no beams": (
        ("--strategy", "greedy", "--length-penalty", "0"),
        "--length-penalty belongs to beam search",
    ),
    "greedy draws": (("--strategy", "greedy", "--temperature", "1"), "leave one out"),
    "samples at temperature 0": (("--strategy", "sample"), "--temperature above 0"),
    "a contrast, compiled": (("--amateur", "demo", "--compile"), "leave out --compile"),
}


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("name", list(OPTIONS))
def test_options(refused: Any, place: Place, name: str) -> None:
    argv, said = OPTIONS[name]
    assert said in refused(*generate(place, *argv))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("name", ["--backbone", "--heads"])
def test_a_folder_that_does_not_exist(refused: Any, place: Place, tmp_path: Path, name: str) -> None:
    assert str(tmp_path / "absent") in refused(*generate(place, **{name: str(tmp_path / "absent")}))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("name", ["--backbone", "--heads"])
def test_a_folder_without_heads_is_rejected(refused: Any, place: Place, tmp_path: Path, name: str) -> None:
    assert str(tmp_path) in refused(*generate(place, **{name: str(tmp_path)}))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--draws", "0"), "at least 1"),
        (("--epsilon", "2"), "epsilon is 2"),
        (("--report", "/no/such/folder/r.html"), "/no/such/folder/r.html"),
        (("--report", "verify.pdf"), "--report verify.pdf: the report is an HTML page"),
        (("--tree", "oak"), "no tree 'oak'"),
    ],
)
def test_impossible_verify_requests_are_rejected(
    place: Place, capsys: Any, tmp_path: Path, argv: tuple[str, ...], said: str
) -> None:
    models = ("--backbone", place.backbone, "--heads", place.heads, "--prompts", place.prompts)
    given = ("verify", *models, "--report", str(tmp_path / "r.html"), *argv)
    try:
        status = main([*given])
    except SystemExit as exit:  # argparse
        status = int(exit.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("no_loading")
def test_an_amateur_of_another_tokenizer(refused: Any, place: Place, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place.backbone, other)
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    (other / "tokenizer.json").write_text(text.replace('"c": 2', '"ß": 2'), encoding="utf-8")
    said = refused(*generate(place, "--amateur", other))
    assert f"the amateur {other} has another tokenizer: 'c' is 2 in {place.backbone} and nothing in {other}" in said
    measure = ("benchmark", "--backbone", place.backbone, "--heads", place.heads, "--prompts", place.prompts)
    assert "cannot be combined with --amateur" in refused(
        *measure, "--amateur", place.backbone, "--against", "prompt-lookup"
    )
    assert f"the draft model {other} has another tokenizer" in refused(*measure, "--against", f"model:{other}")
    assert "the draft model demo has 4096 tokens" in refused(*measure, "--against", "model:demo")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--prompt-lookup",), "--prompt-lookup has another name now: --against prompt-lookup"),
        (("--draft-model", "demo"), "--draft-model has another name now: --against model:demo"),
        (("--draft-model",), "--against model:B"),
        (("--against", "demo"), "--against is 'demo'; give model:B, with a draft model B, or prompt-lookup"),
        (("--against", "model:"), "--against is 'model:'"),
        (("--against", "prompt-lookup", "--against", "prompt-lookup"), "one is given twice"),
        (("--against", "prompt-lookup", "--batch-size", "2"), "one prompt at a time, and --batch-size is 2"),
        (("--report", "x.pdf"), "--report x.pdf: a report is an HTML page; name it x.html, or give a folder"),
        (("--report", "x.html", "--json", "x.html"), "--json and --report both write x.html"),
        (("--epsilon", "0.2"), "--epsilon 0.2 has an effect only with typical acceptance"),
        (("--temperature", "1", "--delta", "0.2"), "--delta 0.2 has an effect only with typical acceptance"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_impossible_benchmarks(
    refused: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    models = ("--backbone", place.backbone, "--heads", place.heads, "--prompts", place.prompts)
    assert said in refused("benchmark", *models, *argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_loading")
def test_a_report_never_replaces_another_file(
    refused: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("r.html").write_text("kept", encoding="utf-8")
    models = ("--backbone", place.backbone, "--heads", place.heads, "--prompts", place.prompts)
    for command in ("benchmark", "verify"):
        assert "r.html exists already" in refused(command, *models, "--report", "r.html")
        assert "both write" in refused(command, *models, "--report", "r.html", "--json", "./r.html")
    assert Path("r.html").read_text(encoding="utf-8") == "kept"


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--plot", "x.xyz"), "--plot x.xyz is no picture; its name must end in .png"),
        (("--plot", "x"), "--plot x is no picture"),
        (("--plot", "no/x.png"), "--plot no/x.png: there is no folder no"),
        (("--plot", "x.png", "--json", "x.png"), "--json and --plot both write x.png"),
        (("--max-new-tokens", "9"), "3 prompts with --max-new-tokens 9 give at most 27"),
    ],
)
def test_impossible_calibrations(refused: Any, place: Place, argv: tuple[str, ...], said: str) -> None:
    models = ("--backbone", place.backbone, "--heads", place.heads, "--prompts", place.prompts)
    assert said in refused("calibrate", *models, *argv)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("strategy", ["beam", "best-first-beam"])
def test_searches(refused: Any, place: Place, strategy: str) -> None:
    def said(*argv: str) -> str:
        return refused(*generate(place, "--strategy", strategy, *argv, **{"--heads": None}))

    drafting = (("--drafter", "ngram"), ("--plain",), ("--amateur", "demo"))
    for option in (*drafting, ("--temperature", "1"), ("--top-k", "3"), ("--stop", "a")):
        assert said(*option).endswith(f"leave out {option[0]}")
    assert (
        "one prompt at a time" in said("--batch-size", "2")
        if strategy != "beam"
        else "belongs" in said("--max-queued", "9")
    )
    if strategy != "beam":
        assert "at least --num-beams, 5" in said("--num-beams", "5", "--max-queued", "4")


@pytest.mark.usefixtures("no_loading")
def test_drafters_that_need_heads(refused: Any, place: Place) -> None:
    assert "--heads H, --drafter ngram, or --plain" in refused(*generate(place, **{"--heads": None}))
    assert "drafter heads needs --heads H" in refused(*generate(place, "--drafter", "heads", **{"--heads": None}))
    measure = ("benchmark", "--backbone", place.backbone, "--prompts", place.prompts)
    assert "--heads is missing" in refused(*measure)
    assert "needs --heads H" in refused(*measure, "--drafter", "ngram", "--drafter", "heads")
    assert "given twice" in refused(*measure, "--drafter", "ngram", "--drafter", "ngram")


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--temperature", "1", "--draft", "sample", "--lossy"), "with 'typical' use draft 'topk'"),
        (("--temperature", "1", "--draft", "sample", "--temperatures", "0,1"), "with 'greedy' use draft 'topk'"),
        (("--tree", "dynamic:16", "--stop-drafting", "0.1", "--lossy"), "would depend on the batch; use typical"),
    ],
)
def test_further_measurements_are_checked_before_the_first(
    refused: Any, place: Place, options: tuple[str, ...], told: str
) -> None:
    measure = ("benchmark", "--backbone", place.backbone, "--heads", place.heads, "--prompts", place.prompts)
    assert told in refused(*measure, *options)


@pytest.mark.usefixtures("no_loading")
def test_no_prompt_at_all(refused: Any, place: Place) -> None:
    assert "--prompts FILE" in refused(*generate(place, **{"--prompt": None}))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("broken.jsonl", b'{"prompt": "a"}\n{"prompt": "b"\n', "broken.jsonl:2: not JSON"),
        ("other.jsonl", b'{"prompt": "a"}\n{"story": "b"}\n', "other.jsonl:2: none of prompt"),
        ("latin.txt", "a\ncafé".encode("latin-1"), "latin.txt:2: not UTF-8"),
        ("empty.jsonl", b"", "empty.jsonl is empty"),
        ("empty.jsonl", b"\xff\xfe", "empty.jsonl:1: not UTF-8"),
        ("table.csv", b"a,b", "table.csv: files end in .jsonl"),
    ],
)
def test_prompts_that_cannot_be_read(
    refused: Any, place: Place, tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in refused(*generate(place, "--prompts", tmp_path / name))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("command", ["generate", "evaluate", "benchmark"])
def test_every_decoding_command_rejects_the_same_requests(
    refused: Any, place: Place, tmp_path: Path, command: str
) -> None:
    prompts = "--data" if command == "evaluate" else "--prompts"
    argv = (command, "--backbone", place.backbone, prompts, place.prompts)
    assert "absent" in refused(*argv, "--heads", tmp_path / "absent")
    assert "absent" in refused(*argv, "--heads", place.heads, "--json", tmp_path / "absent" / "out.json")
    assert "float8" in refused(*argv, "--heads", place.heads, "--dtype", "float8")


# --- trees and heads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"paths": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}', "4 deep but there are 3 heads"),
        ('{"paths": [[0], [1, 0]]}', "[1, 0] has no parent; add the path [1]"),
        ('{"paths": [[0], [0]]}', "twice"),
        ('{"paths": [[-1]]}', "no rank"),
        ('{"paths": [[0.5]]}', "no rank"),
        ('{"paths": [[]]}', "no path"),
        ('{"paths": 5}', "must hold"),
        ("[[0]]", "must hold"),
        ("{", "neither JSON nor YAML"),
        ('{"paths": [[60]]}', None),
        ('{"paths": [[61]]}', "guess 62 of a head, but the vocabulary is 61"),
    ],
)
def test_invalid_trees_are_rejected(refused: Any, place: Place, tmp_path: Path, content: str, said: str | None) -> None:
    (tmp_path / "tree.json").write_text(content, encoding="utf-8")
    argv = generate(place, "--tree", tmp_path / "tree.json", "--max-new-tokens", "2", "--quiet")
    if said is None:
        assert main([str(word) for word in argv]) == 0
    else:
        assert said in refused(*argv)


def test_heads_of_another_hidden_size(refused: Any, place: Place, tmp_path: Path) -> None:
    random_heads(tiny_model("llama", hidden_size=16)).save_pretrained(tmp_path)
    line = refused(*generate(place, **{"--heads": str(tmp_path)}))
    assert "hidden size 16" in line
    assert "32" in line


def test_heads_of_another_vocabulary(refused: Any, place: Place, tmp_path: Path) -> None:
    random_heads(tiny_model("llama", vocab_size=50)).save_pretrained(tmp_path)
    line = refused(*generate(place, **{"--heads": str(tmp_path)}))
    assert "50" in line
    assert "61" in line


def test_a_prompt_longer_than_the_context(refused: Any, place: Place) -> None:
    assert "128" in refused(*generate(place, **{"--prompt": "b" * 129}))


def test_ids_beyond_the_vocabulary(refused: Any, place: Place, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 61]}', encoding="utf-8")
    assert "61" in refused(*generate(place, "--prompts", tmp_path / "ids.jsonl", **{"--prompt": None}))


def test_misplaced_recordings_are_rejected(
    refused: Any, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    assert "are not features" in refused(*generate(place, "--record", str(tmp_path / "thesis")))
    assert "is a file" in refused(*generate(place, "--record", str(tmp_path / "thesis" / "chapter1.txt")))
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


def test_an_attention_that_does_not_exist(refused: Any, place: Place) -> None:
    assert "telepathy" in refused(*generate(place, "--attention", "telepathy"))


# --- damaged files ---------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(place: Place, tmp_path: Path) -> Path:
    """A copy of backbone and heads that may be damaged."""
    for name in ("backbone", "heads"):
        shutil.copytree(getattr(place, name), tmp_path / name)
    return tmp_path


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"garbage": b"garbage" * 99, "truncated": content[: len(content) // 2], "empty": b""}[how])


@pytest.mark.parametrize("how", ["garbage", "truncated", "empty"])
def test_damaged_heads(refused: Any, place: Place, copied: Path, how: str) -> None:
    damage(copied / "heads" / "medusa_lm_head.safetensors", how)
    assert "medusa_lm_head.safetensors is damaged" in refused(*generate(place, **{"--heads": str(copied / "heads")}))
    assert "damaged" in refused("info", copied / "heads")


@pytest.mark.parametrize("how", ["garbage", "truncated", "empty"])
def test_damaged_heads_in_the_originals_format(refused: Any, place: Place, copied: Path, how: str) -> None:
    from safetensors.torch import load_file

    file = copied / "heads" / "medusa_lm_head.safetensors"
    torch.save(load_file(file), file.with_suffix(".pt"))
    file.unlink()
    damage(file.with_suffix(".pt"), how)
    assert "medusa_lm_head.pt is damaged" in refused(*generate(place, **{"--heads": str(copied / "heads")}))


class Payload:
    """An object that runs a program when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def test_code_in_a_pickle_is_not_run(refused: Any, place: Place, copied: Path) -> None:
    (copied / "heads" / "medusa_lm_head.safetensors").unlink()
    torch.save({"0.0.linear.weight": Payload(copied / "ran")}, copied / "heads" / "medusa_lm_head.pt")
    assert "medusa_lm_head.pt" in refused(*generate(place, **{"--heads": str(copied / "heads")}))
    assert not (copied / "ran").exists()


@pytest.mark.parametrize(("name", "content"), [("config.json", "{"), ("config.json", "[]")])
def test_a_damaged_configuration_of_heads(refused: Any, place: Place, copied: Path, name: str, content: str) -> None:
    (copied / "heads" / name).write_text(content, encoding="utf-8")
    assert name in refused(*generate(place, **{"--heads": str(copied / "heads")}))


@pytest.mark.parametrize("how", ["garbage", "truncated", "empty"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_backbone(refused: Any, place: Place, copied: Path, name: str, how: str) -> None:
    damage(copied / "backbone" / name, how)
    assert str(copied / "backbone") in refused(*generate(place, **{"--backbone": str(copied / "backbone")}))


def test_a_backbone_with_a_missing_tensor_is_rejected(refused: Any, place: Place, copied: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copied / "backbone" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    line = refused(*generate(place, **{"--backbone": str(copied / "backbone")}))
    assert "model.layers.1.mlp.up_proj.weight" in line


# --- training and distillation ---------------------------------------------------------------------------------------


@pytest.fixture
def recipe(place: Place, tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        content = {"backbone": place.backbone, "data": place.prompts, "output_dir": str(tmp_path / "out")} | changes
        (tmp_path / "recipe.yaml").write_text(json.dumps(content), encoding="utf-8")
        return tmp_path / "recipe.yaml"

    return write


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"headz": {}}, "unknown key headz; did you mean heads?"),
        ({"heads": {"nun": 3}}, "unknown key heads.nun; did you mean heads.num?"),
        ({"training": {"learning_rat": 1}}, "did you mean training.learning_rate?"),
        ({"heads": {"num": "four"}}, "heads.num is 'four'"),
        ({"backbone": None}, "backbone is missing"),
        ({"backbone": "/no/such/folder"}, "/no/such/folder"),
        ({"data": "/no/such/file.jsonl"}, "/no/such/file.jsonl"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "abacus"}, "abacus"),
        ({"training": {"max_minutes": -1}}, "max_minutes is -1"),
        ({"training": {"objective": "both"}}, "text, argmax"),
        ({"training": {"learning_rate": "fast"}}, "learning_rate"),
        ({"data": {"path": "tests", "long_documents": "shred"}}, "split, truncate, drop"),
        ({"data": {"path": "tests", "shuffle_buffer": 0}}, "data.shuffle_buffer is 0"),
        ({"data": {"path": "tests", "streaming": "yes"}}, "data.streaming is 'yes'"),
    ],
)
def test_recipes(refused: Any, recipe: Any, changes: dict[str, Any], said: str) -> None:
    assert said in refused("train", recipe(**changes))


@pytest.mark.usefixtures("no_loading")
def test_missing_and_invalid_recipes_are_rejected(refused: Any, recipe: Any, tmp_path: Path) -> None:
    assert "absent.yaml" in refused("train", tmp_path / "absent.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1", encoding="utf-8")
    assert "broken.yaml is not YAML" in refused("train", tmp_path / "broken.yaml")
    assert "key=value" in refused("train", recipe(), "heads.num")
    assert "seed" in refused("train", recipe(), "training.seed=lucky")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "d.jsonl:2: a conversation needs a chat template"),
        ('{"input_ids": [1, 2, 99]}', "d.jsonl:2: the id 99"),
        ('{"text": 5}', "d.jsonl:2: text is 5; it must be a text"),
        ('{"text": "a', "d.jsonl:2: not JSON"),
        ('{"text": "caf\udce9"}', "d.jsonl:2: not UTF-8 (byte 14 of the line is 0xe9); convert the file"),
    ],
)
@pytest.mark.parametrize("inspect", [(), ("--inspect",)], ids=["train", "inspect"])
def test_unusable_training_data_is_rejected(
    refused: Any, recipe: Any, tmp_path: Path, row: str, said: str, inspect: Argv
) -> None:
    """The error names file, line and remedy; `--inspect` finds the same errors as training."""
    text = '{"text": "abc"}\n' + row + "\n"
    (tmp_path / "d.jsonl").write_bytes(text.encode(errors="surrogateescape"))
    assert said in refused("train", recipe(data=str(tmp_path / "d.jsonl")), "--quiet", *inspect)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "d.jsonl is empty; it must hold at least one record"),
        ("\n\n", "d.jsonl is empty"),
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
    from transformers import AutoTokenizer

    shutil.copytree(place.backbone, tmp_path / "gemma")
    tokenizer = AutoTokenizer.from_pretrained(place.backbone)
    tokenizer.chat_template = GEMMA
    tokenizer.save_pretrained(tmp_path / "gemma")
    return str(tmp_path / "gemma")


def test_roles_the_chat_template_rejects(refused: Any, recipe: Any, gemma: str, tmp_path: Path) -> None:
    user = {"role": "user", "content": "a"}
    rows = [[user, {"role": "assistant", "content": "b"}], [{"role": "system", "content": "a"}, user]]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
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


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "either --prompts FILE or --self-talk N"),
        (("--self-talk", "2", "--prompts", "p.jsonl"), "either --prompts FILE or --self-talk N"),
        (("--self-talk", "2", "--temperature", "-1"), "temperature is -1"),
        (("--prompts", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
        (("--self-talk", "2", "--dtype", "float8"), "float8"),
    ],
)
def test_distillation(refused: Any, place: Place, tmp_path: Path, argv: Argv, said: str) -> None:
    output = tmp_path / "own.jsonl"
    assert said in refused("distill", "--backbone", place.backbone, "--output", output, *argv)
    assert list(tmp_path.iterdir()) == [], "a refused request leaves nothing behind"


@pytest.mark.usefixtures("no_loading")
def test_a_distillation_into_a_missing_folder(refused: Any, place: Place, tmp_path: Path) -> None:
    output = tmp_path / "absent" / "own.jsonl"
    assert str(output) in refused("distill", "--backbone", place.backbone, "--self-talk", "1", "--output", output)


def test_missing_heads_are_rejected(refused: Any, tmp_path: Path) -> None:
    assert "absent" in refused("info", tmp_path / "absent")
    assert "holds neither" in refused("info", tmp_path)


@pytest.mark.parametrize(
    "argv",
    [["distill"], ["generate", "--batch-sizes", "1"], ["train"], ["generate", "--temperature", "warm"], ["nonsense"]],
    ids=" ".join,
)
def test_usage_errors_are_one_line_with_status_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(argv)
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("medusa")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-new-tokens", "many"], "'many' is no such number; it must be a whole number of at least 1"),
        (["--batch-size", "1.5"], "'1.5' is no such number; it must be a whole number of at least 1"),
        (["--seed", "x"], "it must be a whole number from 0 to 4294967295"),
        (["--top-p", "most"], "'most' is no such number; it must be "),
    ],
)
def test_what_is_no_number_is_told_what_it_must_be(
    capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(["generate", *argv])
    assert said in capsys.readouterr().err


# --- datastores ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--data", "/no/such/file.jsonl"), "/no/such/file.jsonl"),
        (("--data", "tests", "--suffix", ".cobol"), "no file at tests ends in .cobol"),
        (("--data", "tests", "--max-bytes", "9"), "--max-bytes works only with --suffix"),
        (("--data", "tests", "--suffix", ".py", "--json", "/no/such/folder/x.json"), "/no/such/folder/x.json"),
        (("--data", "tests", "--suffix", ".py", "--output", "tests"), "tests holds something other than a datastore"),
        (("--data", "tests", "--suffix", ".py", "--backbone", "/no/such/model"), "no backbone at /no/such/model"),
    ],
)
def test_a_datastore(refused: Any, place: Place, tmp_path: Path, argv: Argv, said: str) -> None:
    assert said in refused("datastore", "build", "--backbone", place.backbone, "--output", tmp_path / "store", *argv)


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
