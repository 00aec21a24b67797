"""scripts/draw_kinds.py: a picture of each kind of head."""

from __future__ import annotations

from pathlib import Path

import pytest

import draw_kinds


@pytest.mark.parametrize("kind", draw_kinds.KINDS)
def test_a_picture_of_each_kind(kind: str) -> None:
    (axes,) = draw_kinds.draw_kind(kind).axes
    shown = {text.get_text() for text in axes.texts}
    assert {draw_kinds.KINDS[kind]["caption"], "guess 1", "guess 2", "guess 3"} <= shown


def test_the_pictures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_kinds, "KINDS", {"eagle": draw_kinds.KINDS["eagle"]})
    draw_kinds.main([str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"eagle.png"}
