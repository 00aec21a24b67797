"""Generation settings: their checks and defaults."""

from __future__ import annotations

import pytest

from decode.settings import Settings


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "greedy"), (0.7, "rejection")])
def test_the_default_acceptance_is_lossless(temperature: float, rule: str) -> None:
    assert Settings(temperature=temperature).to_dict()["acceptance"] == rule
