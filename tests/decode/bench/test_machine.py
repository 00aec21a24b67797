"""What a benchmark says about the machine."""

from __future__ import annotations

from dataclasses import asdict

from decode.bench.machine import machine


def test_a_figure_says_what_it_was_measured_on() -> None:
    about = asdict(machine())
    assert {"processor", "gpu", "threads", "system", "python", "torch", "transformers"} == about.keys()
    assert about["processor"]
