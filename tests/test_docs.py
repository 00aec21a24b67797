"""Every command in README, docs, recipes and help texts is what the real parser takes; the quick ones are run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from medusa.__main__ import COMMANDS, build_parser, main
from train.config import load_config

ROOT = Path(__file__).parents[1]
SOURCES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted((ROOT / "medusa" / "commands").glob("*.py")),
    *sorted((ROOT / "medusa" / "assets").rglob("*.md")),
]
RUN_HERE = [  # no model of the reader's, no GPU, no network: seconds each
    'medusa generate --backbone demo --heads demo --prompt "Once upon a time"',
    "medusa info demo",
    "medusa evaluate --backbone demo --heads demo --data medusa/assets/prompts.jsonl",
    "medusa benchmark --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl",
    "medusa verify --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl",
    "medusa calibrate --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl",
    'medusa generate --backbone demo --heads demo --tree configs/trees/example.yaml --prompt "One day"',
]
SMALLER = {
    "evaluate": ["--max-prompts", "2"],
    "benchmark": ["--max-prompts", "2", "--rounds", "1"],
    "calibrate": ["--max-prompts", "8", "--max-new-tokens", "24", "--rounds", "1"],
    "verify": ["--max-prompts", "2", "--draws", "5000", "--max-new-tokens", "16"],
}


def commands() -> list[tuple[str, str]]:
    """(file, command) for every line that starts with `medusa`, in a code block, a comment or a help text."""
    found = []
    for source in SOURCES:
        text = source.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            match = re.match(rf"^[#\s]*(medusa (?:{'|'.join(COMMANDS)})\b.*)$", line)
            if match:
                found.append((str(source.relative_to(ROOT)), match[1]))
    return found


def arguments(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


@pytest.mark.parametrize(("source", "command"), commands())
def test_every_command_in_the_docs_parses(source: str, command: str) -> None:
    words = arguments(command)
    build_parser(words[0]).parse_args(words)


def test_the_docs_have_commands() -> None:
    assert {arguments(command)[0] for _, command in commands()} >= set(COMMANDS)


@pytest.mark.parametrize("command", RUN_HERE)
def test_quick_commands_of_the_docs_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    words = arguments(command)
    if words[0] == "verify":
        words += ["--report", str(tmp_path / "report.html")]
    assert any(command in line for _, line in commands()), "this command is in no document any more"
    assert main([*words, *SMALLER.get(words[0], [])]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_a_valid_configuration(path: Path) -> None:
    load_config(path, [])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_field_of_a_recipe_has_its_sentence(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.match(r"^\s*[a-z_]+: \S", line):
            assert "#" in line, f"{path.name}: {line.strip()} is not explained"


def test_links_between_documents_lead_somewhere() -> None:
    for source in SOURCES:
        if source.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)\)", source.read_text(encoding="utf-8")):
                assert (source.parent / target).exists(), f"{source.name} links to {target}"
