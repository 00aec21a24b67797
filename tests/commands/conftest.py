"""Fixtures for the tests of commands: a small backbone on disk with heads and prompts, and no loading of weights."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

import pytest
from transformers import AutoModelForCausalLM

from decode.bench.calibration import calibrate
from medusa.commands.fit import plan, stages
from tests.commands.test_cli import Place, build


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return build(tmp_path_factory.mktemp("place"))


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading large weights takes minutes, so wrong requests must be refused before loading."""

    def load(*args: object, **keywords: object) -> NoReturn:
        pytest.fail("a backbone was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)


@pytest.fixture
def short_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make calibration and benchmark short: no figure of these tests is a measurement."""
    monkeypatch.setattr(stages, "CALIBRATION_TOKENS", 24)
    monkeypatch.setattr(stages, "CALIBRATED_ON", 1300)
    monkeypatch.setattr(plan, "BENCHMARK_TOKENS", 16)
    monkeypatch.setattr(plan, "FEWEST_BENCHMARK_TOKENS", 16)
    monkeypatch.setattr(plan, "BENCHMARK_SECONDS", 0.0)  # instead of all prompts, the fewest
    monkeypatch.setattr(plan, "FEWEST_TEST", 4)
    monkeypatch.setattr(calibrate, "SIZES", (1, 4, 8))
    monkeypatch.setattr(calibrate, "SHORTLISTS", (8, 16))
    monkeypatch.setattr(calibrate, "time_steps", partial(calibrate.time_steps, steps=8))
