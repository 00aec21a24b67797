"""The command line as people expect it: heads by position, help on one screen, nearest names, closed pipes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from decode.settings import Settings
from medusa import progress
from medusa.__main__ import COMMANDS
from medusa.commandline import until_pipe_closes
from medusa.commands import models
from medusa.commands.benchmark import BenchmarkOptions
from medusa.commands.options import CommandOptions, Output
from medusa.commands.serve import ServeOptions
from medusa.errors import RequestError
from medusa.files import read_json, write_json
from tests.commands.place import Outcome, Place
from tests.train.processes import forked_command

Medusa = Callable[..., Outcome]


def copied(heads: str, folder: Path, backbone: str | None) -> str:
    """A copy of the heads whose config records a backbone."""
    shutil.copytree(heads, folder)
    content = read_json(folder / "config.json") | {"base_model_name_or_path": backbone, "backbone": {}}
    write_json(folder / "config.json", content)
    return str(folder)


@pytest.fixture(scope="module")
def own(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The same files, with heads that record their backbone."""
    return place._replace(heads=copied(place.heads, tmp_path_factory.mktemp("own") / "heads", place.backbone))


# --- heads by position and the backbone that they record --------------------------------------------------------------

SHORT = ("--max-new-tokens", "6")


def test_generate_with_heads_and_prompts_by_position(medusa: Medusa, own: Place, tmp_path: Path) -> None:
    def results(*argv: Any) -> Any:
        done = medusa("generate", *argv, *SHORT, "--json", tmp_path / "out.json")
        assert done.status == 0, done.err
        content = read_json(tmp_path / "out.json")
        assert content["settings"]["backbone"] == own.backbone
        return [result["new_ids"] for result in content["results"]]

    expected = results(*own.models, "--prompt", "abc", "--prompt", "d")
    assert results(own.heads, "abc", "--seed", "1", "d") == expected
    assert results("abc", *own.models, "--prompt", "d") == expected
    assert results("--backbone", own.backbone, "--drafter", "ngram", "abc", "d") == expected
    assert results("--backbone", own.backbone, "--plain", "abc", "d") == expected


@pytest.mark.parametrize(
    "argv",
    [
        ("evaluate", "HEADS", "--data", "PROMPTS", "--max-prompts", "2", *SHORT),
        ("export", "HEADS", "--to", "hub", "--output", "OUT"),
        ("info", "HEADS"),
        ("info", "--heads", "HEADS"),
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_commands_take_heads_by_position(medusa: Medusa, own: Place, tmp_path: Path, argv: tuple[str, ...]) -> None:
    words = {"HEADS": own.heads, "PROMPTS": own.prompts, "OUT": str(tmp_path / "out")}
    done = medusa(*(words.get(word, word) for word in argv))
    assert done.status == 0, done.err


@pytest.mark.parametrize(
    "argv",
    [("chat",), ("serve",), ("calibrate",), *((name, "--prompts", "PROMPTS") for name in ("verify", "benchmark"))],
)
def test_commands_find_the_backbone_of_the_heads(
    medusa: Medusa, own: Place, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    opened = []

    def note(command: CommandOptions, *_: Any, **__: Any) -> None:
        opened.append((command.models.backbone, command.models.heads))
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "open_models", note)
    assert medusa(argv[0], own.heads, *(own.prompts if w == "PROMPTS" else w for w in argv[1:])).status == 130
    assert opened == [(own.backbone, own.heads)]


def test_the_backbone_on_the_command_line_comes_first(medusa: Medusa, place: Place, tmp_path: Path) -> None:
    heads = copied(place.heads, tmp_path / "heads", "/no/such/backbone")
    assert medusa("generate", heads, "abc", "--backbone", place.backbone, *SHORT).status == 0


@pytest.mark.parametrize(
    ("recorded", "told"),
    [
        (None, "do not record their backbone; add --backbone B"),
        ("./gone", "record a backbone, but no backbone at ./gone: there is no such folder"),
        ("/no/such/backbone", "record a backbone, but no backbone at /no/such/backbone: there is no such folder"),
    ],
)
def test_a_backbone_that_cannot_be_found(
    refused: Any, place: Place, tmp_path: Path, recorded: str | None, told: str
) -> None:
    said = refused("generate", copied(place.heads, tmp_path / "heads", recorded), "abc")
    assert told in said
    assert said.endswith("add --backbone B")


def test_a_relative_backbone_is_found_from_its_folder(
    medusa: Medusa, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = copied(place.heads, tmp_path / "heads", Path(place.backbone).name)
    monkeypatch.chdir(Path(place.backbone).parent)
    assert medusa("generate", heads, "abc", *SHORT).status == 0


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_is_written_on_a_terminal_of_any_width(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    assert medusa("info", "--help").status == 0


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_one_screen_and_help_all_shows_every_option(
    medusa: Medusa, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The short help has purpose, examples and the main options."""
    monkeypatch.setenv("COLUMNS", "80")
    brief, whole = one_screen(medusa(command, "--help")), medusa(command, "--help-all").out
    usage, purpose, *_ = brief.split("\n\n")
    assert usage.startswith(f"usage: medusa {command}")
    assert purpose.strip()[0].isupper()
    assert f"\n  medusa {command}" in brief, "an example"
    assert f"medusa {command} --help-all" in brief
    assert len(re.findall(r"^  [-\w{]", brief.partition("options:")[2], re.MULTILINE)) <= 16
    named = r"^  (--[\w-]+)"
    assert {*re.findall(named, brief, re.MULTILINE)} <= {*re.findall(named, whole, re.MULTILINE)}
    assert "--json FILE" in whole or command == "serve"


def one_screen(done: Outcome) -> str:
    """A help text, which has at most 30 lines of 80 characters."""
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) <= 30, done.out
    assert max(map(len, lines)) <= 80, [line for line in lines if len(line) > 80]
    return done.out


def test_help_all_shows_options_that_help_leaves_out_in_groups(medusa: Medusa) -> None:
    brief, full = medusa("generate", "--help").out, medusa("generate", "--help-all").out
    for option in ("--contrast-beta", "--stop-drafting", "--num-beams", "--attention"):
        assert option not in brief
        assert option in full
    assert "\ngeneration:\n" in full
    assert "\nmodels:\n" in full


def test_help_of_medusa_lists_all_commands(medusa: Medusa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = one_screen(medusa("--help"))
    for command, summary in COMMANDS.items():
        assert re.search(rf"^ +{command} +{re.escape(summary)}$", text, re.MULTILINE), command
    assert medusa("--help-all") == medusa("--help")


# --- closed pipes and progress without a terminal ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ("export", "--help-all"),
        ("generate", "demo", "Once", "--max-new-tokens", "8"),
    ],
    ids=" ".join,
)
def test_a_closed_pipe_ends_quietly(argv: tuple[str, ...], tmp_path: Path) -> None:
    """With the status of programs that SIGPIPE ends, because the work may not be done.

    Help texts come from a new process, and the others from a copy of this one, which has imported torch."""
    reading, writing = os.pipe()
    os.close(reading)
    told = tmp_path / "told"
    with told.open("w", encoding="utf-8") as errors:
        if argv[-1].startswith("--help"):
            program = [sys.executable, "-m", "medusa", *argv]
            status = subprocess.run(program, stdout=writing, stderr=errors, timeout=200).returncode
        else:
            status = os.waitstatus_to_exitcode(os.waitpid(forked_command(argv, writing, errors.fileno()), 0)[1])
    os.close(writing)
    assert status == 128 + signal.SIGPIPE, told.read_text()
    for wrong in ("Traceback", "Broken pipe", "BrokenPipeError"):
        assert wrong not in told.read_text()


def test_a_broken_pipe_to_another_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def write() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        until_pipe_closes(write)


def test_an_output_that_the_shell_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """`medusa info demo >&-`: Python then has no `sys.stdout`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert until_pipe_closes(lambda: 3) == 3


def test_progress_without_a_terminal_is_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of work that takes a while; a stage says what it does."""
    assert [*Output().track([1, 2], "counting")] == [1, 2]
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(progress, "EVERY", 0.02)
    began = time.monotonic()
    with Output().progress_bars() as start:
        advance = start("generating", 50)
        advance(20)
        for _ in range(10):
            time.sleep(0.01)
            advance(0)
    seconds = time.monotonic() - began
    out, err = capsys.readouterr()
    assert out == ""
    assert 1 <= len(err.splitlines()) <= 1 + seconds / 0.02
    assert all(re.match(r"generating: 20 of 50, 0:00 elapsed", line) for line in err.splitlines()), err
    with Output().stage("reading") as stage:
        stage.update("sorting")
        time.sleep(0.1)
    assert set(capsys.readouterr().err.splitlines()) == {"sorting ..."}


def test_quiet_progress_prints_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    output = Output(quiet=True)
    with output.stage("reading"), output.progress_bars() as start:
        start("generating", 50)(20)
        time.sleep(0.1)
    assert [*output.track([1, 2], "counting")] == [1, 2]
    assert capsys.readouterr() == ("", "")


# --- output paths ----------------------------------------------------------------------------------------------------


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)  # the tests may run as root, who may write everywhere
    with pytest.raises(RequestError, match=r"--json .*x\.json: nothing can be written in .* \(Permission denied\)"):
        Output(json=str(tmp_path / "x.json"))


# --- options without an effect ---------------------------------------------------------------------------------------


def test_sampling_options_have_an_effect_where_a_temperature_may_follow() -> None:
    settings = Settings(top_p=0.9)
    assert ServeOptions(settings=settings, plain=True).may_sample
    assert BenchmarkOptions(settings=settings, temperatures=(0.0, 1.0)).may_sample
    assert not BenchmarkOptions(temperatures=(0.0,)).may_sample
