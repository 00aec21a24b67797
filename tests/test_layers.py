"""Who may import whom, read from the sources; and what can be imported without transformers."""

from __future__ import annotations

import ast
import subprocess
import sys
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
    """The command line alone knows all packages."""
    inside = path.relative_to(ROOT).parts
    return inside == ("medusa", "__main__.py") or inside[:2] == ("medusa", "commands")


def imported(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


def test_the_check_sees_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "x.py"
    path.write_text("def f():\n  from train.data import y\n  import decode.cache\nimport_module(f'scripts.{f}')\n")
    assert imported(path) == {"train", "decode", "scripts"}


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


def test_the_command_line_starts_without_torch() -> None:
    without("medusa", "torch", "transformers")


def test_the_block_blocks() -> None:
    with pytest.raises(AssertionError, match="transformers is blocked"):
        without("decode.loop", "transformers")


def test_no_script_hides_a_package() -> None:
    names = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert not names & {"medusa", "train", "decode", "tests"}
