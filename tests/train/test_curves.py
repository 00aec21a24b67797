"""The plot of a run, and a line of its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import random_ids
from tests.train.recipes import recipes
from train.callbacks import summarize
from train.outcome import draw_curves
from train.recipe import parse_recipe
from train.run import train

LOG: list[dict[str, Any]] = [
    {"step": 1, "loss": 3.0, "head1_top1": 0.1, "head2_top1": 0.05},
    {"step": 1, "eval_loss": 3.1, "eval_head1_top1": 0.1, "eval_head2_top1": 0.05},
    {"step": 2, "loss": 2.0, "head1_top1": 0.5, "head2_top1": 0.3},
    {"step": 2, "train_runtime": 1.0},
]


def test_loss_and_accuracy_of_each_head_are_plotted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    from matplotlib.figure import Figure

    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))[1])
    draw_curves(LOG, tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    loss, guesses = figures[0].axes
    assert {line.get_label(): list(line.get_ydata()) for line in loss.lines} == {"loss": [3.0, 2.0], "eval_loss": [3.1]}
    assert {line.get_label(): list(line.get_ydata()) for line in guesses.lines} == {
        "head 1": [0.1, 0.5],
        "head 2": [0.05, 0.3],
        "eval_head 1": [0.1],
        "eval_head 2": [0.05],
    }
    draw_curves([], tmp_path / "empty.png")
    assert (tmp_path / "empty.png").is_file(), "a run without a line has a picture without lines"


def test_a_run_saves_its_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.run.draw_curves", draw_curves)
    content = recipes(tmp_path, [{"input_ids": random_ids(20)}], 20, max_steps=2, logging_steps=1, save_strategy="no")
    train(parse_recipe(content("out"), "test"))
    assert (tmp_path / "out" / "training.png").stat().st_size > 1000


def test_the_log_shows_the_divergence_of_an_adapted_backbone() -> None:
    assert summarize(LOG[0]) == "loss 3.000  top-1 0.100 0.050"
    assert summarize(LOG[0] | {"lm_loss": 0.0123}) == "loss 3.000  top-1 0.100 0.050  lm 0.0123"
