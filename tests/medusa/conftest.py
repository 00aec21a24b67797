"""Fixtures for the tests of exports. The module of a test has the backbone, as a fixture `backbone`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from medusa import MedusaHeads
from medusa.__main__ import main


@pytest.fixture
def export_words(tmp_path: Path, backbone: Path) -> Callable[[MedusaHeads | Path, str], list[str]]:
    """The command line that exports heads, or those in a folder, to a format."""

    def words(heads: MedusaHeads | Path, to: str) -> list[str]:
        folder = heads if isinstance(heads, Path) else tmp_path / "heads"
        if isinstance(heads, MedusaHeads):
            heads.save_pretrained(folder)
        places = ["--output", str(tmp_path / f"as {to}"), "--backbone", str(backbone)]
        return ["export", "--heads", str(folder), "--to", to, *places]

    return words


@pytest.fixture
def exported(export_words: Callable[..., list[str]], tmp_path: Path) -> Callable[..., Path]:
    """Export heads; gives the folder of the export."""

    def export(heads: MedusaHeads | Path, to: str, *more: str) -> Path:
        assert main([*export_words(heads, to), *more]) == 0
        return tmp_path / f"as {to}"

    return export


@pytest.fixture
def not_exported(
    export_words: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Export heads to a format that cannot hold them; gives the one-line error. Nothing is left behind."""

    def export(heads: MedusaHeads | Path, to: str) -> str:
        words = export_words(heads, to)
        before = sorted(path.name for path in tmp_path.iterdir())
        assert main(words) == 2
        said = capsys.readouterr().err.strip()
        assert "\n" not in said
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return said

    return export
