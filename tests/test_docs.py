"""The real parsers accept every command in README, docs, recipes and help texts.

Commands of README and docs that need no GPU, network or server are run in order, at reduced size: those of README
always, those of other pages with `--full`. The other commands say what they need.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import importlib.util
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from medusa.__main__ import COMMANDS, build_parser, main
from tests.helpers import times_of_few_steps
from train.recipe import load_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    *PAGES,
    *sorted((ROOT / "configs").rglob("*.yaml")),
    *sorted((ROOT / "medusa" / "commands").glob("*.py")),
    *sorted((ROOT / "medusa" / "assets").rglob("*.md")),
]
BLOCK = re.compile(
    r"^(?:<!-- not run here: needs (?P<needs>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<lines>.*?)^```", re.M | re.S
)
PROGRAMS = re.compile(r"^(?:[A-Z_]+=\S+ +)*(medusa|python3?|pip|make|torchrun|accelerate|mkdocs|\S+/bin/\w+) ")
RUN_ELSEWHERE = {  # a command that needs nothing, and the test or CI step that runs it
    "medusa demo": "tests/commands/test_demo.py",
    "medusa chat demo": "tests/commands/test_chat.py, with typed input",
    "make demo": "tests/commands/test_demo.py, which runs what it runs",
    "make check": ".ci/run, in parts",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make docs": "tests/test_site.py, which does what it does",
    "make format": "whoever commits",
    "python3 -m venv .venv && . .venv/bin/activate": ".ci/run, by the Makefile",
    "pip install -c constraints.txt -e .": ".ci/run, by the Makefile",
    "python .ci/check_wheel.py": "ci.yml, with --full",
    "mkdocs build --strict": "tests/test_site.py",
    "python -m scripts.gpu_battery --rehearse --output runs/rehearsal": "tests/scripts/test_gpu_battery.py",
}
SMALLER = runpy.run_path(str(ROOT / ".ci" / "check_wheel.py"))["SMALLER"] | {
    "calibrate": ["--max-prompts", "3", "--max-new-tokens", "16", "--rounds", "1"],
    "distill": ["--self-talk", "4", "--max-new-tokens", "32"],
    "train": ["training.max_steps=2"],
}


class Command(NamedTuple):
    source: str  # the page it stands on
    line: str  # as one line, without its comment
    needs: str | None  # what it was not run for want of, as the page says


def shell_commands(page: Path) -> Iterator[Command]:
    """The commands of a page's code blocks. `<!-- not run here: needs X -->` before a block covers the block."""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        language = block["language"]
        for raw in block["lines"].replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+", " ", raw.strip())
            if (
                line
                and not line.startswith("#")
                and (language in ("bash", "sh") or (not language and PROGRAMS.match(line)))
            ):
                yield Command(page.name, re.sub(r"\s+#\s.*$", "", line), block["needs"])


SHELL = [command for page in PAGES for command in shell_commands(page)]


def medusa_commands(source: Path) -> list[Command]:
    """The lines of a file that start with `medusa`, in a code block, a comment or a help text."""
    text, known = source.read_text(encoding="utf-8").replace("\\\n", " "), "|".join(COMMANDS)
    return [
        Command(source.name, line, None)
        for line in re.findall(rf"^[#\s]*(medusa (?:{known})\b.*)$", text, re.MULTILINE)
    ]


def arguments(command: str) -> list[str]:
    return shlex.split(command, comments=True)[1:]


@functools.cache
def parser_of(command: str) -> argparse.ArgumentParser:
    return build_parser(command)


def parse_of_medusa(words: list[str]) -> None:
    parser_of(words[0]).parse_args(words)


def test_commands_are_found_in_the_docs() -> None:
    found = [arguments(command.line)[0] for source in SOURCES for command in medusa_commands(source)]
    assert set(found) >= set(COMMANDS)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_command_parses(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command's own parser accepts it; other programs, except our launchers, must say what they need."""
    for command in [*medusa_commands(source), *(shell_commands(source) if source in PAGES else ())]:
        print(f"{source.name}: {command.line}")
        with monkeypatch.context() as patch:
            try_to_parse(command, patch)


def try_to_parse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command.line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        words.pop(0)
    match words:
        case ["medusa", *rest]:
            parse_of_medusa(rest)
        case ["torchrun", *rest]:
            from torch.distributed.run import get_args_parser

            parsed = get_args_parser().parse_args(rest)
            if not parsed.module:  # a script that the page itself shows
                assert f"```python\n# {parsed.training_script}\n" in (ROOT / "docs" / command.source).read_text("utf-8")
                return
            assert parsed.training_script == "medusa"
            parse_of_medusa(parsed.training_script_args)
        case ["accelerate", "launch", *rest]:
            from accelerate.commands.launch import launch_command_parser

            parsed = launch_command_parser().parse_args(rest)
            assert parsed.module
            assert parsed.training_script == "medusa"
            assert parsed.config_file is None or (ROOT / parsed.config_file).is_file()
            parse_of_medusa(parsed.training_script_args)
        case ["python" | "python3", script, *rest] if script.startswith(("scripts/", ".ci/", "notebooks/")):
            parse_of_script(ROOT / script, rest, monkeypatch)
        case ["python", "-m", "scripts.gpu_battery", *rest]:
            parse_of_script(ROOT / "scripts" / "gpu_battery" / "__main__.py", rest, monkeypatch)
        case ["python", "-m", "scripts.gpu_battery.bundle", *rest]:
            parse_of_script(ROOT / "scripts" / "gpu_battery" / "bundle.py", rest, monkeypatch)
        case ["make", *targets]:
            rules = (ROOT / "Makefile").read_text(encoding="utf-8")
            assert all(re.search(rf"^{target}:", rules, re.MULTILINE) for target in targets)
        case _:
            assert command.needs or command.line in RUN_ELSEWHERE, f"{command.source}: nobody parses {command.line}"


class Parsed(Exception):
    """Raised when a script's parser has accepted its arguments."""


def parse_of_script(script: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `main` of a script until its parser has parsed the arguments."""
    spec = importlib.util.spec_from_file_location(f"script_{script.stem}", script)
    assert spec is not None, f"{script} is not there"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        real(self, words)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    with pytest.raises(Parsed):
        module.main()


def to_run() -> dict[str, list[str]]:
    """The commands to run, by page: those without a reason to skip them, each at its first occurrence."""
    pages: dict[str, list[str]] = {}
    seen = set(RUN_ELSEWHERE)
    for command in SHELL:
        if command.needs is None and command.line not in seen:
            seen.add(command.line)
            pages.setdefault(command.source, []).append(command.line)
    return pages


@pytest.fixture(scope="module")
def one_cache(caches: Iterator[Path]) -> Path:
    """A cache with calibrations of the shipped heads, shared by all pages."""
    return next(caches)


@pytest.mark.usefixtures("one_tree_check")
@pytest.mark.slow
@pytest.mark.timeout(900)  # seconds on a free machine
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (page != "README.md")) for page in to_run()]
)
def test_commands_without_special_needs_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, one_cache: Path
) -> None:
    """Run a page's commands in order in one folder, so that later commands find the files of earlier commands."""
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")  # all that a page may need of the sources
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(one_cache))
    monkeypatch.setattr("decode.bench.calibration.calibrate.SIZES", (1, 4))
    monkeypatch.setattr("decode.bench.calibration.variants.SHORTLISTS", (16,))
    monkeypatch.setattr("decode.bench.calibration.calibrate.time_steps", times_of_few_steps)
    monkeypatch.setattr("decode.bench.calibration.recording.OWN_TEXTS", 4)
    for name in ("stored", "calibrate"):  # the figures do not matter here
        monkeypatch.setattr(f"decode.bench.calibration.{name}.MIN_STEPS", 30)
    for line in to_run()[page]:
        words = arguments(line)
        assert line.startswith("medusa "), f"{page}: say what {line!r} needs, or who runs it (RUN_ELSEWHERE)"
        small = [] if words[:2] == ["benchmark", "--compare"] or "--inspect" in words else SMALLER.get(words[0], [])
        status, told = main([*words, *small]), capsys.readouterr()
        assert status == 0, f"{page}: {line}\n{told.err}"
        assert (told.out + told.err).strip(), line


def test_skipped_commands_appear_in_a_page() -> None:
    lines = {command.line for command in SHELL}
    assert not set(RUN_ELSEWHERE) - lines


def test_a_skipped_command_without_a_reason_is_detected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run here: needs a GPU -->\n```bash\n# c\na 1\n```\n\n```sh\nb \\\n  2  # x\n```\n")
    assert list(shell_commands(page)) == [Command("page.md", "a 1", "a GPU"), Command("page.md", "b 2", None)]


def test_no_code_block_begins_with_a_note_for_the_tests() -> None:
    assert not [
        page.name for page in PAGES for block in BLOCK.finditer(page.read_text("utf-8")) if "not run" in block["lines"]
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_in_the_docs_imports_existing_names(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("medusa", "train", "decode"):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_is_valid_and_explains_each_field(path: Path) -> None:
    load_recipe(path, [])
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.match(r"^\s*[a-z_]+: \S", line):
            assert "#" in line, f"{line.strip()} is not explained"


def test_the_glossary_is_sorted_and_explains_words_in_use() -> None:
    """Each term occurs in another page, in a help text or in an error."""
    glossary = (ROOT / "docs" / "faq.md").read_text(encoding="utf-8").split("## Glossary\n")[1]
    terms = [line.removeprefix("| ").split(" | ")[0] for line in glossary.splitlines() if line.startswith("| ")][1:]
    assert len(terms) > 60
    assert terms == sorted(terms, key=str.lower)
    sources = [*PAGES, *(path for name in ("medusa", "train", "decode") for path in (ROOT / name).rglob("*.py"))]
    texts = [path.read_text(encoding="utf-8") for path in sources if path.name not in ("faq.md", "log.md")]
    used = re.sub(r"\s+", " ", "\n".join(texts)).lower()
    for term in terms:
        for word in re.split(", | and ", term.lower()):
            assert re.search(rf"\b{re.escape(word)}s?\b", used), word


def test_results_name_no_folder_of_a_machine() -> None:
    files = [path for path in (ROOT / "docs" / "results").rglob("*") if path.suffix in (".json", ".jsonl")]
    assert len(files) > 10
    for path in files:
        assert not re.search(r'"/\w+/', path.read_text(encoding="utf-8")), path.name


def test_links_between_documents_resolve() -> None:
    for source in SOURCES:
        if source.suffix == ".md":
            for target in re.findall(r"\]\(([^)#:]+)\)", source.read_text(encoding="utf-8")):
                assert (source.parent / target).exists(), f"{source.name} links to {target}"
