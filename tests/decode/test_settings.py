"""Generation settings: their checks and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from decode.settings import Settings
from medusa.errors import RequestError


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_p": 2.0}, "top_p is 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"stop": ("a", "")}, "stop string is empty"),
        ({"acceptance": "hopeful"}, "greedy, rejection, typical"),
        ({"acceptance": "typical"}, "needs a temperature above 0"),
        ({"acceptance": "greedy", "temperature": 1.0}, "temperature 0"),
        ({"temperature": 1.0, "epsilon": 1.5}, "epsilon is 1.5"),
        ({"temperature": 1.0, "delta": -0.1}, "delta is -0.1"),
    ],
)
def test_invalid_settings_are_rejected_with_the_allowed_values(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Settings(**settings)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "greedy"), (0.7, "rejection")])
def test_the_default_acceptance_is_lossless(temperature: float, rule: str) -> None:
    assert Settings(temperature=temperature).to_dict()["acceptance"] == rule
