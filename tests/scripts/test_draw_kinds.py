"""scripts/draw_kinds.py: a picture of each kind of head."""

from __future__ import annotations

from pathlib import Path

import pytest

import draw_kinds


def test_a_picture_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = list[tuple[str, set[str]]](), draw_kinds.draw_kind

    def noted(kind: str) -> object:
        figure = draw(kind)
        drawn.append((kind, {text.get_text() for text in figure.axes[0].texts}))
        return figure

    monkeypatch.setattr(draw_kinds, "draw_kind", noted)
    draw_kinds.main([str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == {kind for kind, _ in drawn} == set(draw_kinds.KINDS)
    for kind, shown in drawn:
        assert {draw_kinds.KINDS[kind]["caption"], "guess 1", "guess 2", "guess 3"} <= shown
