"""A model whose logits become NaN ends sampling with an error, as in `model.generate`, and writes no token of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import decode.loop
from decode import steps
from decode.loop import Step
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.serve.batch import UNDEFINED, RunningBatch
from decode.texts import stepper_for
from medusa.backbone import Backbone
from medusa.errors import RunError
from tests.helpers import left_padded, random_heads, random_ids, run_as_written, tiny_model, weekly

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 20, "eos_token_id": None}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"tree": "chain:0"},
    "walk": {"tree": "topk:3,2"},
    "walk, penalties": {"tree": "topk:3,2", "repetition_penalty": 1.2},
    "drawn drafts": {"tree": "topk:3,2", "draft": "sample"},
    "compiled": {"tree": "topk:3,2", "compile": True},
    "eta": {"eta_cutoff": 1e-3},  # its warper makes a distribution, which PyTorch would check
}


class Breaking:
    """A model that gives logits of NaN while `broken`; so do its heads, which use its LM head."""

    def __init__(self) -> None:
        self.model, self.broken = tiny_model(), False
        self.heads = random_heads(self.model, lm_head="shared")
        Backbone(self.model)  # reads how the model computes its logits, once
        self.model.lm_head.register_forward_hook(lambda _, __, out: out * torch.nan if self.broken else out)


@pytest.fixture(scope="module")
def breaking() -> Breaking:
    return Breaking()


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch, breaking: Breaking) -> None:
    run_as_written(monkeypatch)
    breaking.broken = False


def begun(breaking: Breaking, rows: int, **options: Any) -> Iterator[Step]:
    prompts = left_padded([random_ids(5 + row, seed=row) for row in range(rows)])
    return steps(breaking.model, breaking.heads, **prompts, seeds=list(range(rows)), **SAMPLED | options)


def read(taken: Iterator[Step], rows: list[list[int]], breaking: Breaking | None = None) -> None:
    """Append the tokens of all steps to `rows`; after three steps, break the model."""
    for number, step in enumerate(taken):
        for row, ids in step.ids.items():
            rows[row] += ids
        if breaking is not None:
            breaking.broken = number >= 2


@pytest.mark.parametrize(("rows", "waits"), [(3, True), *weekly((1, False))])
@pytest.mark.parametrize("mode", MODES)
def test_sampling_ends_with_an_error(
    breaking: Breaking, monkeypatch: pytest.MonkeyPatch, mode: str, rows: int, waits: bool
) -> None:
    """`waits`: as on a GPU, where walks go on after their ends."""
    monkeypatch.setattr(decode.loop, "host_waits", lambda device: waits)
    whole, written = ([list[int]() for _ in range(rows)] for _ in range(2))
    read(begun(breaking, rows, **MODES[mode]), whole)
    with pytest.raises(RunError, match="probabilities that are NaN"):
        read(begun(breaking, rows, **MODES[mode]), written, breaking)
    assert written == [text[: len(own)] for text, own in zip(whole, written, strict=True)]
    assert all(4 <= len(own) < 20 for own in written)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_token_is_checked(breaking: Breaking, mode: str) -> None:
    breaking.broken = True
    with pytest.raises(RunError, match="probabilities that are NaN"):
        next(begun(breaking, 1, **MODES[mode]))
    with pytest.raises(RuntimeError):
        breaking.model.generate(torch.tensor([random_ids(5)]), **SAMPLED)


def test_broken_heads_do_not_change_the_text(breaking: Breaking) -> None:
    heads = random_heads(breaking.model)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.fill_(torch.nan)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([random_ids(6)]), "seeds": [1]} | SAMPLED
    plain, chosen, drawn = ([list[int]()] for _ in range(3))
    read(steps(breaking.model, heads, tree="chain:0", **inputs), plain)
    read(steps(breaking.model, heads, tree="topk:3,2", **inputs), chosen)
    read(steps(breaking.model, heads, tree="topk:3,2", draft="sample", **inputs), drawn)
    assert chosen == plain
    assert len(drawn[0]) == 20  # other draws of the same distribution


def test_undefined_texts_of_the_running_batch_end(breaking: Breaking) -> None:
    """They raise no error. That other texts go on is shown in tests/decode/serve/test_ends.py."""
    batch = RunningBatch(lambda requests: stepper_for(breaking.model, None, requests, AcceptanceRule("rejection")))
    for prompt in ([1, 2, 3], [4, 5]):
        batch.join(prepare(breaking.model, [prompt], [0], **SAMPLED))
        batch.step()
    breaking.broken = True
    batch.step()
    assert batch.step().ids == {}
    assert (batch.rows, batch.sequences.finish_reason) == ([], [UNDEFINED] * 2)
