"""What the terminal shows is complete in 60 columns."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from decode.bench.calibration.stored import Calibration, CalibrationPoint, RecordedTexts
from decode.bench.compare import compare
from decode.bench.report.terminal import print_benchmark, print_calibration, print_comparison
from tests.decode.bench.made_up import outcome


def assert_complete(text: str, *words: str) -> None:
    assert "\u2026" not in text
    assert all(word in text for word in words), text


def test_a_calibration() -> None:
    points = [CalibrationPoint(1, [], 1.0, 20.5), CalibrationPoint(64, [[0]], 12.25, 123.45, dynamic=True)]
    out = io.StringIO()
    found = Calibration(points, 1, [1.0], {}, RecordedTexts(32))
    print_calibration(Console(file=out, width=60), found, 12.34, Path("a[b]/calibration.json"))
    rates = [f"{1000 / 20.5:.0f}", f"{12250 / 123.45:.0f}"]
    assert_complete(out.getvalue(), "predicted tau", "12.25", "123.45", *rates, "x plain", "chosen", "12.340", "a[b]/")


def test_a_benchmark_and_a_comparison() -> None:
    then, now = outcome([0.8, 0.9, 0.7]), outcome([0.4, 0.6, 0.5])
    out = io.StringIO()
    console = Console(file=out, width=60)
    print_benchmark(console, now)
    comparison = compare(then, now, ("old.json", "this run"))
    print_comparison(console, comparison)
    rows = [word for its in now.methods.values() for word in (f"{its.speedup:.2f}", f"{its.speedup_vs_generate:.2f}")]
    changes = [word for row in comparison.changes for word in (row.label, f"{row.ratio:.3f}", row.verdict)]
    assert_complete(out.getvalue(), "min-max", "same text", "100%", *rows, *changes)
    taus = "tau 3.00 (95 %: 3.00 to 3.00) over all steps, 3.00 (95 %: 3.00 to 3.00) as the mean of the texts' tau"
    told = " ".join(out.getvalue().split())
    assert taus in told
    assert now.misprediction.startswith("tau is 3.00, 20% lower than the calibration predicted (3.75)")
    assert now.misprediction in told
