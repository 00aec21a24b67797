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
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"temperature": 1.0, "epsilon": 1.5}, "epsilon is 1.5"),
    ],
)
def test_errors_name_the_arguments_of_python(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Settings(**settings)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, "greedy"), (0.7, "rejection")])
def test_the_default_acceptance_is_lossless(temperature: float, rule: str) -> None:
    assert Settings(temperature=temperature).to_dict()["acceptance"] == rule
