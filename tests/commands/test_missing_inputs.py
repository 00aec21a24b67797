"""An input that does not exist is refused before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from medusa.__main__ import COMMANDS, main
from medusa.arguments import _arguments
from medusa.options import Options, argument_name

BASE = {  # requests that would work
    "fit": "demo --prompts demo --output new",
    "demo": "",
    "info": "demo",
    "train": "medusa1",
    "generate": "demo abc",
    "chat": "demo",
    "serve": "demo",
    "evaluate": "demo --data demo",
    "calibrate": "demo --prompts demo",
    "benchmark": "demo --prompts demo",
    "verify": "demo --prompts demo",
    "distill": "--backbone demo --prompts demo --output new.jsonl",
    "export": "demo --to vllm --output new",
    "datastore": "build --backbone demo --data demo --output new",
}
GONE = {"tree": "./gone.json", "drafter": "mix:heads+rest:./gone", "against": "model:./gone"}
PLACEHOLDERS = ("FILE", "DIR", "B", "H", "MODEL", "RECIPE", "OLD", "METHOD")
CHECKED = "config"  # by `TrainOptions.completed`, with the inputs that a recipe names
OUTPUTS = "output json report plot record"  # arguments that name what is written


def options_of(command: str) -> type[Options]:
    module = import_module(f"medusa.commands.{command}")
    found: type[Options] = getattr(module, module.run.__annotations__["options"])
    return found


def inputs_of(command: str) -> list[str]:
    """The arguments of a command that name an input."""
    return [argument_name(known) for known, _ in _arguments(options_of(command)) if known.metadata.get("exists")]


def lines() -> dict[str, list[str]]:
    """A command line for each input of each command, with a name that does not exist."""
    found = {}
    for command, base in BASE.items():
        for name in inputs_of(command):
            words, gone = shlex.split(base), GONE.get(name, "./gone.jsonl")
            if f"--{name}" in words:
                words[words.index(f"--{name}") + 1] = gone
            elif name in ("model", "heads") and words[:1] == ["demo"]:
                words[0] = gone
            else:
                words += [f"--{name}", gone]
            found[f"{command} {name}"] = [command, *words]
    found["train data"] = ["train", "medusa1", "data=./gone.jsonl"]
    found["train exclude"] = ["train", "medusa1", "data=demo", "data.exclude=./gone.jsonl"]
    found["train backbone"] = ["train", "medusa1", "backbone=./gone"]
    found["train start"] = ["train", "medusa1", "data=demo", "heads.start=./gone"]
    found["train recipe"] = ["train", "./gone.yaml"]
    found["device"] = ["generate", "./gone", "abc", "--device", "cpu"]
    return found


def test_missing_inputs_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    code = (
        "import contextlib, io, json, sys, medusa.__main__ as m\n"
        "found = {}\n"
        "for name, words in json.load(sys.stdin).items():\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as told:\n"
        "        try: status = m.main(words)\n"
        "        except SystemExit as end: status = end.code\n"
        "    found[name] = [status, told.getvalue(), 'torch' in sys.modules]\n"
        "print(json.dumps(found))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(lines()),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=True,
    )
    for name, (status, told, has_torch) in json.loads(done.stdout).items():
        assert status == 2, (name, told)
        assert "./gone" in told, (name, told)
        assert told.count("\n") == 1, told
        assert not has_torch, name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_argument_with_a_file_or_model_is_checked(command: str) -> None:
    """A new option with such a placeholder needs `exists`, or a place in the lists of this file."""
    for known, _ in _arguments(options_of(command)):
        about, name = known.metadata, argument_name(known)
        is_named = any(word in about["metavar"].split("|") for word in PLACEHOLDERS)
        if is_named and "type" not in about["argparse"] and name not in f"{OUTPUTS} {CHECKED}".split():
            assert about.get("exists") is not None, name
    assert command in BASE


def test_the_lists_name_options_that_exist() -> None:
    known = {argument_name(field) for command in COMMANDS for field, _ in _arguments(options_of(command))}
    assert {*GONE, *OUTPUTS.split()} <= known


@pytest.mark.parametrize(
    "words", ["fit my model --prompts demo", "generate demo --prompts my model", "chat ./my model"]
)
def test_a_path_without_quotes_is_named(words: str, tmp_path: Path, refused: Any, monkeypatch: Any) -> None:
    (tmp_path / "my model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "model has a space, so the shell cut it; quote it: '" in refused(*words.split())


def test_a_second_word_for_one_argument_is_explained(refused: Any) -> None:
    assert "unexpected argument word; quote values with spaces" in refused("fit", "demo", "word", "--prompts", "demo")


def test_the_command_alone_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    told = capsys.readouterr().out
    assert all(f"\n  {name} " in told for name in COMMANDS)
