"""Intervals of figures by resampling."""

from __future__ import annotations

from dataclasses import replace

import torch

from decode.bench.compare import Sample, interval
from decode.bench.figures import PromptFigures


def test_the_interval_has_its_nominal_coverage() -> None:
    """Of 400 benchmarks of 30 prompts with a true speedup of 2, 95 % (plus or minus 5) of the intervals contain 2.

    (A bootstrap of 30 prompts is a little too narrow: 93 % is usual.)"""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(400):
        noise = torch.rand(30, generator=generator)  # mean 0.5
        plain = [PromptFigures(i, 1, 1, 1, [2.0]) for i in range(30)]
        heads = [replace(line, seconds=[0.5 + float(x)]) for line, x in zip(plain, noise, strict=True)]
        ours = Sample.of(heads)
        low, high = interval(ours.speedup(Sample.of(plain), ours.resampling()))
        held += low <= 2.0 <= high
    assert 0.90 <= held / 400 <= 0.99
