"""What a benchmark says if a calibration predicted another tau than it measured."""

from __future__ import annotations

import pytest

from decode.bench.calibration.stored import Calibration, CalibrationPoint, RecordedTexts
from decode.bench.figures import Interval, Prediction
from decode.drafters.layouts import DynamicTree, with_shortlist
from medusa.tree import Tree, usual_shortlist

FILE = RecordedTexts(30, 3840, source="questions.jsonl", prompts_sha256="same")
OWN = RecordedTexts(32, 3072)


@pytest.mark.parametrize("tau", [2.86, 3.0, 3.14])
def test_up_to_5_percent_are_no_difference(tau: float) -> None:
    assert Prediction(3.0, OWN).difference(tau, (tau, tau), "other", 128) == ""


@pytest.mark.parametrize(
    ("texts", "tau", "interval", "prompts", "length", "told"),
    [
        (
            FILE,
            2.4,
            (2.3, 2.5),
            "other",
            128,
            "the calibration was made from other text, 30 texts of 3840 tokens (questions.jsonl);",
        ),
        (OWN, 2.4, (2.3, 2.5), "other", 96, "other text, 32 texts of 3072 tokens (the backbone's own); calibrate with"),
        (OWN, 2.4, None, None, 96, "the calibration was made from other text"),
        (FILE, 2.4, (1.9, 3.1), "other", 128, "chance, as the 95 % interval over prompts is 1.90 to 3.10; give more"),
        (FILE, 2.4, (2.3, 2.5), "same", 40, "these texts have 40 tokens on average, and those of the calibration 128;"),
        (FILE, 3.6, (3.5, 3.7), "same", 120, "chance, or rounding that changed the text; calibrate with more prompts."),
    ],
)
def test_the_likely_reason_is_told(
    texts: RecordedTexts, tau: float, interval: Interval | None, prompts: str | None, length: float, told: str
) -> None:
    found = Prediction(3.0, texts).difference(tau, interval, prompts, length)
    side = "higher" if tau > 3 else "lower"
    assert found.startswith(f"tau is {tau:.2f}, 20% {side} than the calibration predicted (3.00). Likely reason: ")
    assert told in found


def test_a_calibration_predicts_the_trees_that_it_tried() -> None:
    points = [CalibrationPoint(1, [], 1.0, 2.0), CalibrationPoint(3, [[0], [0, 0]], 2.5, 4.0)]
    points.append(CalibrationPoint(3, [], 2.75, 4.0, dynamic=True))
    found = Calibration(points, 1, [1.0, 0.7], {}, OWN)
    assert found.predicted_tau(Tree.from_paths([[0], [0, 0]])) == 2.5
    assert found.predicted_tau(Tree.chain(0)) == 1.0
    assert found.predicted_tau(DynamicTree.over_heads(3, 2, (1.0, 0.7))) == 2.75
    assert found.predicted_tau(DynamicTree.over_heads(3, 2, (1.0, 0.8))) is None
    assert found.predicted_tau(Tree.from_paths([[0], [1]])) is None
    assert found.predicted_tau(with_shortlist(Tree.chain(0), 3)) is None, "other candidates of the heads"
    found.shortlist = usual_shortlist(3)
    assert found.predicted_tau(Tree.from_paths([[0], [0, 0]])) == 2.5, "as many as by default"
