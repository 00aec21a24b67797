"""scripts/draw.py: the figures of a benchmark in a picture, and the other pictures as files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import draw
from decode.bench.figures import MethodFigures, Rate
from tests.decode.bench.made_up import result_of


def test_the_picture_contains_the_figures_of_the_json() -> None:
    method = MethodFigures(Rate(100.0, 90.0, 110.0), 1.0, 10, 10, [], 1.0, 1.0, 1.0)
    step_ms = {"propose": 0.5, "verify": 2.0, "accept": 0.25, "compact": 0.25, "other": 0.25}
    medusa = replace(method, speedup=1.75, tau=2.5, accepted_by_depth=[0.8, 0.5], step_ms=step_ms)
    figure = draw.draw_benchmark(result_of({"plain": method, "transformers": method, "medusa": medusa}))
    speedups, rates, depth, stages = figure.axes
    assert [bar.get_width() for bar in rates.patches] == [100.0] * 3
    assert [text.get_text() for text in speedups.texts] == ["1.00 x", "1.00 x", "1.75 x"]
    assert [bar.get_height() for bar in depth.patches] == [0.8, 0.5]
    assert "2.50" in depth.get_title()
    assert [text.get_text() for text in stages.texts] == ["3.25"]


@pytest.mark.parametrize("kind", draw.KINDS)
def test_a_picture_of_each_kind(kind: str) -> None:
    (axes,) = draw.draw_kind(kind).axes
    shown = {text.get_text() for text in axes.texts}
    assert {draw.KINDS[kind]["caption"], "guess 1", "guess 2", "guess 3"} <= shown


def test_the_pictures_of_exactness(tmp_path: Path) -> None:
    draw.main(["exactness", str(tmp_path), "--draws", "200"])
    assert {path.stem for path in tmp_path.glob("*.png")} == {"rejection", "verify"}
