"""The headline of a benchmark claims a gain only where the figures show one."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from decode.bench.report.page import benchmark_page
from decode.bench.report.terminal import print_benchmark, print_headline
from decode.bench.result import FASTER, NO_GAIN, NOT_MEASURED, SLOWER, BenchmarkResult
from tests.decode.bench.made_up import outcome

FAST, SAME, SLOW = [0.5, 0.45, 0.55], [1.0, 1.1], [2.0, 2.1, 1.9]


def test_a_gain_is_claimed_over_plain_decoding_first() -> None:
    result = outcome(FAST)
    told, medusa = result.headline, result.medusa
    assert told.verdict == FASTER
    assert told.title == f"{medusa.speedup:.2f} times as fast as plain decoding"
    spans = [medusa.speedup_interval, medusa.speedup_vs_generate_interval]
    low, high = (f"{span[0]:.2f} to {span[1]:.2f}" for span in spans if span)
    assert f"{medusa.speedup:.2f} times as fast as plain decoding (95 % interval {low})" in told.text
    assert f"{medusa.speedup_vs_generate:.2f} times as fast as model.generate (95 % interval {high})" in told.text
    assert told.text.index("plain decoding") < told.text.index("model.generate")
    for fact in ("is 3.00", "8 of 8 texts equal", "demo with the heads", "a processor", "8 prompts", "2 rounds"):
        assert fact in told.text
    assert told.claim.endswith(f"(95 % interval {low}).")
    assert f"{told.claim} {told.details}" == told.text
    assert result.to_json()["headline"] == vars(told)


@pytest.mark.parametrize(("number", "words"), [(1, "1 thread"), (2, "2 threads")])
def test_a_number_agrees_with_its_noun(number: int, words: str) -> None:
    result = outcome(FAST)
    result.machine.threads = number
    assert f", {words}, 8 prompts of at most" in result.headline.text


@pytest.mark.parametrize(("seconds", "verdict"), [(SAME, NO_GAIN), (SLOW, SLOWER)])
def test_a_run_without_gain_has_no_speedup_as_its_title(seconds: list[float], verdict: str) -> None:
    result = outcome(seconds)
    if verdict == NO_GAIN:
        result.medusa.speedup_interval = (0.97, 1.04)
    told = result.headline
    assert told.verdict == verdict
    assert not re.search(r"\d", told.title)
    assert "times as fast as plain decoding (" not in told.text or verdict == SLOWER
    assert benchmark_page(result, []).title.startswith(told.title)


def test_faster_than_plain_decoding_may_be_no_faster_than_generate() -> None:
    result = outcome(FAST)
    result.medusa.speedup_vs_generate_interval = (0.9, 1.1)
    assert result.headline.verdict == FASTER
    assert "It is not measurably faster than model.generate (95 % interval 0.90 to 1.10)" in result.headline.text


def test_a_drafter_that_did_nothing_has_no_gain() -> None:
    """Noise can put the whole interval above 1."""
    root, idle = outcome(FAST, nodes=1), outcome(FAST)
    idle.medusa.tau = 1.0
    for result, why in (root, "the tree has one node"), (idle, "no drafted token was accepted"):
        assert result.headline.verdict == NO_GAIN
        assert why in result.headline.text


@pytest.mark.parametrize(
    ("settings", "figures", "why"),
    [
        ({}, {"steps": 0}, "no decoding step was measured"),
        ({"prompts": 7}, {}, "8 batches of prompts, and there were 7: give more prompts"),
        ({"batch_size": 2}, {}, "8 batches of prompts, and there were 4"),
        ({"rounds": 1}, {}, "2 rounds, and there were 1: give more rounds (--rounds)"),
        ({"prompts": 3, "rounds": 1}, {}, "more prompts; and at least 2 rounds"),
        ({}, {"speedup_interval": None}, "no intervals, because an earlier version"),
    ],
)
def test_too_little_evidence_gives_a_reason_and_a_way_out(
    settings: dict[str, Any], figures: dict[str, Any], why: str
) -> None:
    result = outcome(FAST, **settings)
    for name, value in figures.items():
        setattr(result.medusa, name, value)
    told = result.headline
    assert told.verdict == NOT_MEASURED
    assert told.text.startswith("No headline: ")
    assert why in told.text
    assert not re.search(r"\d\.\d\d times", told.title + told.text)


def test_texts_are_compared_with_generate_itself() -> None:
    result = outcome(FAST)
    assert "8 of 8 texts equal those of plain decoding and of model.generate." in result.headline.text
    result.medusa.equal_to_generate = 0.75
    assert "8 of 8 texts equal those of plain decoding, and 6 those of model.generate." in result.headline.text
    result.medusa.equal_to_generate = None  # as in files of earlier versions
    assert "8 of 8 texts equal those of plain decoding." in result.headline.text


def test_sampled_and_lossy_texts_are_not_called_equal() -> None:
    sampled = outcome(FAST, temperature=1.0, acceptance="rejection").headline.text
    assert "sampled, so they are not compared" in sampled
    lossy = outcome(FAST, acceptance="typical").headline.text
    assert "Acceptance typical is lossy: the texts may differ" in lossy


def test_the_terminal_shows_the_headline_last() -> None:
    result, out = outcome(FAST), io.StringIO()
    console = Console(file=out, width=80)
    print_benchmark(console, result)
    print_headline(console, result)
    assert " ".join(out.getvalue().split()).endswith(result.headline.text)


def test_a_result_that_was_read_has_the_same_headline() -> None:
    result = outcome(FAST)
    assert BenchmarkResult.from_json(result.to_json(), "b.json").headline == result.headline
