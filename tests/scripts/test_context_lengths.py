"""scripts/context_lengths.py: drafts of heads with a window cost the same after texts of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import context_lengths as script
from decode.bench.methods import plain_method
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.loading import Loaded
from tests.helpers import random_heads, random_ids, tiny_model

EAGLE: dict[str, Any] = {"kind": "eagle", "lm_head": "shared"}


@pytest.mark.parametrize("tree", ["topk:2,2", "dynamic:6"])
def test_only_a_window_makes_the_cost_independent_of_the_text(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "REPEATS", 1)
    model = tiny_model("llama")

    def growth(**settings: Any) -> float:
        heads = random_heads(model, 2, **EAGLE, **settings)
        short, long = (script.cost_of_draft(heads, Backbone(model), tree, context) for context in (20, 60))
        assert min(short["milliseconds"], long["milliseconds"]) > 0
        return long["mflop"] - short["mflop"]

    assert growth() > 0
    assert growth(window=8) == 0


def test_tau_is_measured_after_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NEW_TOKENS": 6, "TREES": ("topk:2,2",)}.items():
        monkeypatch.setattr(script, name, value)
    model = tiny_model("llama")
    heads = {name: random_heads(model, 2, **EAGLE, window=window) for name, window in (("all", None), ("last", 4))}
    rows = torch.tensor([random_ids(12, seed=seed) for seed in range(2)])
    found = script.tau_by_context(Loaded(model, None, "tiny"), heads, rows, contexts=(5, 9))
    assert [(row["heads"], row["context"]) for row in found] == [("all", 5), ("last", 5), ("all", 9), ("last", 9)]
    assert all(len(row["each"]) == row["equal_texts"] == 2 and row["tau"] >= 1 for row in found)


def test_long_prompts_are_decoded_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "READ_AT_ONCE", 25)
    method = plain_method(tiny_model("llama"), Settings(max_new_tokens=3, ignore_eos=True))
    prompts, sizes = [random_ids(12, seed=seed) for seed in range(5)], list[int]()

    def counted(batch: Any) -> Any:
        sizes.append(len(batch))
        return method(batch)

    found = script.continued(counted, prompts)
    assert sizes == [2, 2, 1]
    assert [result.new_ids for result in found] == [result.new_ids for result in method(prompts)]


def test_a_text_must_fit_behind_its_context() -> None:
    paths = ["--backbone", "b", "--data", "d", "--eval", "e", "--output", "o"]
    with pytest.raises(RequestError, match="at most 8096"):
        script.main([*paths, "--length", "8192", "--contexts", "8100"])
    with pytest.raises(RequestError, match="--rows must be at most --length, 1024"):
        script.main([*paths, "--length", "1024", "--contexts", "100", "--rows", "2048"])
