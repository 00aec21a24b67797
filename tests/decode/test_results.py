"""Finished texts: their text, their JSON form and tau."""

from __future__ import annotations

from typing import Any

import pytest

from decode.texts import Result, end_of_context, tau
from medusa.records.pieces import text_of


def test_the_text_holds_no_special_tokens(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"eos_token": "z"})
    assert text_of([1, 2, 25, 3], tokenizer) == "bcd"


def test_the_text_ends_before_the_first_stop_string(tokenizer: Any) -> None:
    assert text_of(range(1, 8), tokenizer, ["f", "de", "xyz"]) == "bc"
    assert text_of(range(1, 3), tokenizer, ["xyz"]) == "bc"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert text_of([1, 2], None) == ""


def test_results_as_json_have_the_documented_fields(tokenizer: Any) -> None:
    told = Result([1], [2, 3, 4], [2, 1], [3, 1], "eos", 0.5).to_json(tokenizer)
    assert told == {
        "input_ids": [1],
        "new_ids": [2, 3, 4],
        "text": "cde",
        "steps": 2,
        "step_lengths": [2, 1],
        "finish_reason": "eos",
        "seconds": 0.5,
    }


def test_tau_counts_tokens_before_the_cut() -> None:
    results = [Result([1], [2], [1], [4]), Result([1], [2, 3, 4], [2, 1], [2, 1])]
    assert tau(results) == pytest.approx(7 / 3)
    assert tau([]) == 0.0


def test_a_text_that_the_context_ends_is_noted() -> None:
    cut, whole, ended = (Result([1] * 3, [2] * 5, finish_reason=why) for why in ("length", "length", "eos"))
    whole.new_ids = [2] * 9
    assert end_of_context([cut], 9) == "the context of 8 tokens ends the text after 5 new tokens"
    assert end_of_context([cut, whole, ended], 9) == "the context of 8 tokens ends 1 of 3 texts before 9 new tokens"
    assert end_of_context([whole, ended], 9) is None
    assert end_of_context([Result([1], [2], finish_reason="stopped")], 9) is None, "the user stopped it"
