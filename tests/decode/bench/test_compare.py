"""Comparisons of two benchmarks: what changed, and whether the change is more than noise."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from decode.bench.benchmark import run_rounds, summarize
from decode.bench.compare import Sample, compare, interval
from decode.bench.figures import PromptFigures
from decode.bench.result import BenchmarkResult
from medusa import RequestError
from tests.decode.bench.made_up import Fake, contenders, result_of

NAMES = ("a.json", "b.json")


def benchmark(seconds: list[float], prompts: int = 12, length: int = 3, **settings: Any) -> BenchmarkResult:
    """A benchmark whose heads need `seconds[prompt]`, and plain decoding 1 s."""
    times = [seconds[index % len(seconds)] for index in range(prompts)]
    them = contenders(Fake("p", [1.0]), Fake("t", [2.0]), Fake("m", [1.0, *times], length))
    run_rounds(them, [[[index]] for index in range(prompts)], rounds=1)
    return result_of(summarize(them, [None] * prompts), **{"prompts": prompts, "tree": [[0]]} | settings)


def change(earlier: BenchmarkResult, later: BenchmarkResult, figure: str = "speedup") -> Any:
    (found,) = (c for c in compare(earlier, later, NAMES).changes if (c.method, c.figure) == ("medusa", figure))
    return found


def test_a_run_and_itself_show_no_difference() -> None:
    run = benchmark([0.2, 0.9])
    comparison = compare(run, copy.deepcopy(run), NAMES)
    assert comparison.differences == []
    assert comparison.same_machine
    assert {c.ratio for c in comparison.changes} == {1.0}
    assert {c.verdict for c in comparison.changes} == {"no difference seen"}


def test_pairs_of_prompts_are_compared() -> None:
    """Prompts differ by a factor of 9 and runs by 5 % on each; resampling with the same prompts shows the 5 %."""
    times = [0.1, 0.3, 0.9]
    better = change(benchmark(times), benchmark([0.95 * time for time in times]))
    assert better.ratio == pytest.approx(1 / 0.95)
    assert better.ratio_interval == pytest.approx([1 / 0.95] * 2, rel=1e-4)
    assert better.verdict == "higher"
    assert change(benchmark([0.95 * time for time in times]), benchmark(times)).verdict == "lower"


def test_noise_is_no_difference() -> None:
    """Each prompt is slower or faster by a tenth at random; the sums differ a little."""
    first, second = [0.50, 0.55, 0.45, 0.50], [0.55, 0.50, 0.50, 0.45]
    assert change(benchmark(first, 13), benchmark(second, 13)).verdict == "no difference seen"


def test_tau_is_compared_too() -> None:
    assert change(benchmark([0.5], length=3), benchmark([0.5], length=4), "tau").ratio == pytest.approx(4 / 3)


def test_other_machines_and_settings_are_named() -> None:
    run = benchmark([0.5])
    other = benchmark([0.5], tree=[[0], [1]], temperature=1.0, command="another", date="today")
    other.machine.processor = "another"
    comparison = compare(run, other, NAMES)
    assert not comparison.same_machine
    assert comparison.differences == [
        ("processor", "a processor", "another"),
        ("temperature", "0.0", "1.0"),
        ("tree", "2 nodes", "3 nodes"),
    ]


def test_a_new_torch_is_the_same_machine() -> None:
    run, other = benchmark([0.5]), benchmark([0.5])
    other.machine.torch = "2.14"
    comparison = compare(run, other, NAMES)
    assert comparison.same_machine
    assert comparison.differences == [("torch", "2.13", "2.14")]


def test_other_prompts_are_refused() -> None:
    with pytest.raises(RequestError, match="other prompts"):
        compare(benchmark([0.5]), benchmark([0.5], prompts_sha256="y"), NAMES)


def test_a_run_without_figures_of_its_prompts_is_refused() -> None:
    early = benchmark([0.5])
    early.settings.prompts_sha256 = None
    with pytest.raises(RequestError, match=r"b.json holds no figures of its prompts"):
        compare(benchmark([0.5]), early, NAMES)


def test_a_single_measurement_gives_no_verdict() -> None:
    run = benchmark([0.5], prompts=1)
    assert change(run, run).verdict == "unknown: a single measurement"


def test_the_interval_has_its_nominal_coverage() -> None:
    """Of 200 benchmarks of 30 prompts with a true speedup of 2, 95 % (plus or minus 5) of the intervals contain 2.

    (A bootstrap of 30 prompts is a little too narrow: 93 % is usual.)"""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        noise = torch.rand(30, generator=generator)  # mean 0.5
        plain = [PromptFigures(i, 1, 1, 1, [2.0]) for i in range(30)]
        heads = [replace(line, seconds=[0.5 + float(x)]) for line, x in zip(plain, noise, strict=True)]
        ours = Sample.of(heads)
        low, high = interval(ours.speedup(Sample.of(plain), ours.resampling()))
        held += low <= 2.0 <= high
    assert 0.90 <= held / 200 <= 0.99
