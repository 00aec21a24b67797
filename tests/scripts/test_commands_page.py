"""The reference of the command line is what the parsers say, and has every option."""

from __future__ import annotations

import re

import pytest

import commands_page
import data_page
from medusa.__main__ import COMMANDS, main


@pytest.fixture(scope="module")
def page() -> str:
    return commands_page.PAGE.read_text(encoding="utf-8")


def test_the_page_is_what_the_parsers_say(page: str) -> None:
    assert page == commands_page.commands_page(), "run python scripts/commands_page.py"


def test_the_page_of_records_and_requests_is_what_the_code_reads() -> None:
    assert data_page.PAGE.read_text(encoding="utf-8") == data_page.data_page(), "run python scripts/data_page.py"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_the_help_is_on_the_page(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The other way to all options is what a user types; every option on the page is in that help, too."""
    with pytest.raises(SystemExit):
        main([command, "--help-all"])
    told = capsys.readouterr().out
    section = re.split(r"^## ", page, flags=re.MULTILINE)[1 + list(COMMANDS).index(command)]
    assert section.startswith(f"{command}\n")
    lines = section.splitlines()
    rows = [line.split(" | ")[0] for line in lines if line.startswith("| `")]
    shared = [line for line in lines if line.startswith("[Shared options](#shared-options): ")]
    listed = re.findall(r"(?<=[` ])--[\w-]+", " ".join(rows + shared))
    shown = re.findall(r"^  (?:-h, )?(--[\w-]+)(?:, (--[\w-]+))?", told, re.MULTILINE)
    assert sorted(listed) == sorted({name for names in shown for name in names if name} - {"--help", "--help-all"})


def test_shared_options_are_explained_once(page: str) -> None:
    *commands, explained = re.split(r"^## ", page, flags=re.MULTILINE)
    rows = [line.split(" | ")[0] for line in explained.splitlines() if line.startswith("| `")]
    names = re.findall(r"--[\w-]+", " ".join(rows))
    assert len(names) == len(set(names))
    assert explained.startswith("Shared options\n")
    named = re.findall(r"^\[Shared options\]\(#shared-options\): (.*)\.$", "\n".join(commands), re.MULTILINE)
    assert set(re.findall(r"`(--[\w-]+)`", " ".join(named))) == set(names)


def test_every_option_is_explained(page: str) -> None:
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in page.splitlines() if "| `" in line[:3]]
    assert len(rows) > 130
    assert all(len(row) == 3 and len(row[1]) > 10 for row in rows)
    assert not re.search(r"\(default:[^|]*\) \|", page), "a default belongs in its own column"
