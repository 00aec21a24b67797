"""Prompts that are longer than the context: commands name the record, and can leave it out (--skip-long)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa.commands.prompting import fitting
from medusa.errors import RequestError
from medusa.loading import TextLimits
from medusa.records.record import Record
from tests.commands.place import Place, write_rows


@pytest.fixture
def wrong(refused: Callable[..., str], place: Place, tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """Run a command with a file of prompts, one of each text; gives the path of the file and the one-line error."""

    def run(command: str, texts: list[str], *argv: str) -> tuple[Path, str]:
        path = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in texts])
        more = ("--max-new-tokens", "900") if command == "calibrate" else ()
        return path, refused(command, *place.models, "--prompts", path, *more, *argv)

    return run


@pytest.mark.parametrize("command", ["generate", "benchmark", "verify", "calibrate"])
@pytest.mark.usefixtures("no_loading")
def test_a_prompt_that_is_too_long_is_named_by_its_line(wrong: Callable[..., Any], command: str) -> None:
    path, line = wrong(command, ["abc", "a" * 129, "d"])
    told = f"{path}:2: the prompt has 129 tokens, but the backbone's context ends at 128; shorten it, or leave out long"
    assert told in line
    assert line.endswith("by --skip-long")
    if command != "calibrate":  # which refuses so few prompts
        _, line = wrong(command, ["a" * 129], "--skip-long")
        assert f"every prompt has more than {126 if command == 'verify' else 128} tokens" in line


@pytest.mark.parametrize("skip", [False, True])
def test_a_prompt_may_fill_the_shortest_context(skip: bool) -> None:
    limits = {"backbone": TextLimits(9, 50), "amateur": TextLimits(6, 50), "other": TextLimits(None, 50)}
    records, notes = [Record(f"mine:{size}") for size in (6, 5, 7)], list[str]()
    prompts = [[1] * size for size in (6, 5, 7)]
    if skip:
        assert fitting(records, prompts, limits, skip, notes.append) == (records[:2], prompts[:2])
        assert notes == ["1 of 3 prompts are left out, because they have more than 6 tokens; the first one is mine:7"]
    else:
        assert fitting(records[:2], prompts[:2], limits, skip, notes.append) == (records[:2], prompts[:2])
        with pytest.raises(RequestError, match="mine:7: the prompt has 7 tokens, but the amateur's context ends at 6"):
            fitting(records, prompts, limits, skip, notes.append)
        assert not notes
    with pytest.raises(RequestError, match="mine:6: the prompt holds the id 50"):
        fitting(records[:1], [[50]], limits, skip, notes.append)


def test_a_prompt_without_room_for_samples_is_named(wrong: Callable[..., Any]) -> None:
    path, line = wrong("verify", ["abc", "a" * 127], "--draws", "100")
    assert f"{path}:2: a prompt to draw from has 127 tokens, but may have 126" in line
