"""Imports between packages, folders and modules, read from the sources; and what works without transformers."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {
    "medusa": {"train", "decode", "scripts", "tests"},
    "train": {"decode", "scripts", "tests"},
    "decode": {"train", "scripts", "tests"},
    "scripts": {"tests"},
}


def reaches_up(path: Path) -> bool:
    """Whether a file may import all packages: only the command line may."""
    inside = path.relative_to(ROOT).parts
    return inside == ("medusa", "__main__.py") or inside[:2] == ("medusa", "commands")


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def imported(path: Path) -> set[str]:
    """Top-level names of all imports anywhere in a file."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(path.relative_to(ROOT).parts[0] if node.level else (node.module or "").split(".")[0])
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", None)) in ("import_module", "__import__")
            and node.args
        ):
            first = node.args[0]
            first = first.values[0] if isinstance(first, ast.JoinedStr) else first
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                names.add(first.value.split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_arrows_point_down(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        forbidden = {"scripts", "tests"} if reaches_up(path) else FORBIDDEN[package]
        wrong = imported(path) & forbidden
        assert not wrong, f"{path.relative_to(ROOT)} imports {', '.join(sorted(wrong))}"


def test_the_check_finds_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "x.py"
    path.write_text("def f():\n  from train.data import y\n  import decode.cache\nimport_module(f'scripts.{f}')\n")
    assert imported(path) == {"train", "decode", "scripts"}


def modules(root: Path) -> dict[str, Path]:
    """All modules of the three packages, by dotted name."""
    found = {}
    for package in ("medusa", "train", "decode"):
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports_of_modules(root: Path) -> dict[str, set[str]]:
    """The modules that each module imports anywhere: at its top, inside functions and under TYPE_CHECKING."""
    known = modules(root)
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        names = []
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        for node in nodes_of(path):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                names += [f"{base}.{alias.name}" for alias in node.names]
        graph[module] = set()
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            graph[module] |= {name} - {"", module}
    return graph


def test_only_the_program_imports_the_commands() -> None:
    """`medusa` is the lowest package, and its folder `commands` imports the two upper ones."""
    users = {
        module
        for module, others in imports_of_modules(ROOT).items()
        if not module.startswith("medusa.commands") and any(other.startswith("medusa.commands") for other in others)
    }
    assert not users, "only medusa/__main__.py imports commands, by their names"
    assert 'import_module(f"medusa.commands.' in (ROOT / "medusa" / "__main__.py").read_text(encoding="utf-8")


def test_imports_have_no_cycles() -> None:
    TopologicalSorter(imports_of_modules(ROOT)).prepare()  # raises CycleError


def test_the_check_finds_cycles(tmp_path: Path) -> None:
    (tmp_path / "decode").mkdir()
    (tmp_path / "decode" / "a.py").write_text("def f():\n  from decode import b\n")
    (tmp_path / "decode" / "b.py").write_text("if TYPE_CHECKING:\n  from .a import f\n")
    with pytest.raises(CycleError):
        TopologicalSorter(imports_of_modules(tmp_path)).prepare()


def test_the_map_shows_every_module_and_every_arrow() -> None:
    """docs/map.md has a section for each folder, with its modules, the folders it imports and those that import it."""
    known = modules(ROOT)
    folder = {module: path.parent.relative_to(ROOT).as_posix() for module, path in known.items()}
    imports: dict[str, set[str]] = defaultdict(set)
    imported_by: dict[str, set[str]] = defaultdict(set)
    for module, others in imports_of_modules(ROOT).items():
        for other in others:
            if folder[module] != folder[other]:
                imports[folder[module]].add(folder[other])
                imported_by[folder[other]].add(folder[module])
    text = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
    sections = {
        section[1 : section.index("`", 1)]: section for section in re.split(r"^### (?=`)", text, flags=re.M)[1:]
    }
    assert set(sections) == set(folder.values()), "docs/map.md has a section for each folder"
    for name, section in sections.items():
        section = section.split("\n### ")[0]
        shown = set(re.findall(r"`(\w+\.py)`", section))
        real = {path.name for module, path in known.items() if folder[module] == name and path.name != "__init__.py"}
        if name != "medusa/commands":  # its files are the sub-commands
            assert shown == real, f"docs/map.md, {name}"
        for line, arrows in (("Imports", imports[name]), ("Imported by", imported_by[name])):
            (listed,) = re.findall(rf"{line}: (.*?)\.(?:<br>|\n)", section, re.DOTALL)
            assert set(re.findall(r"`([\w/]+)`", listed)) == arrows, f"docs/map.md, {name}, {line}"


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
import {module}
"""


def without(module: str, *blocked: str) -> None:
    code = WITHOUT.format(blocked=set(blocked), module=module)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["medusa.tree, medusa.heads.independent, decode.accept"])
def test_the_core_needs_no_transformers(module: str) -> None:
    without(module, "transformers", "tokenizers", "accelerate", "datasets", "peft")


def test_blocked_imports_fail() -> None:
    with pytest.raises(AssertionError, match="transformers is blocked"):
        without("json, transformers.utils", "transformers")


def test_no_script_hides_a_package() -> None:
    names = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert not names & {"medusa", "train", "decode", "tests"}
