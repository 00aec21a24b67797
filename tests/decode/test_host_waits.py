"""How often a step of eager decoding waits for the device: once if greedy, at most twice by any rule but eta_cutoff.

That other drafters and kinds of heads wait no oftener is shown in test_second_device.py, where a wait is an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import decode.loop
from decode import generate, steps
from decode.loop import Step
from medusa import argmax
from tests.decode.host_waits import HostWaits
from tests.helpers import FIRST_TRANSFORMERS, left_padded, plain, random_heads, random_ids, shared_model

NEW, TEXT = 40, 12  # the most tokens of texts that are left after some steps, and of whole texts
STEPS, SKIPPED = 3, 2  # the first steps may prepare what later ones use again
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8}
WARPED = SAMPLED | {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "epsilon_cutoff": 1e-3, "typical_p": 0.95}
READING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 4,
    "min_new_tokens": TEXT,
    "bad_words_ids": [[3], [4, 5]],
    "suppress_tokens": [6],
    "exponential_decay_length_penalty": (20, 1.01),
    "eos_token_id": 7,
}
GREEDY: dict[str, Any] = {"do_sample": False}
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    # the waits of a step, and the options
    "greedy": (1, GREEDY),
    "greedy, penalties": (1, GREEDY | READING),
    "sampled": (1, SAMPLED),
    "sampled, all warpers": (1, WARPED),
    "sampled, eta": (13, SAMPLED | {"eta_cutoff": 1e-3}),  # each call looks for NaN and checks a distribution
    "sampled, penalties": (1, SAMPLED | READING),
    "drawn drafts": (1, SAMPLED | {"draft": "sample"}),
    "drawn drafts, penalties": (1, SAMPLED | READING | {"draft": "sample"}),
    "typical": (1, SAMPLED | {"acceptance": "typical"}),
    "typical, penalties": (2, SAMPLED | READING | {"acceptance": "typical"}),
    "typical-sampled": (1, SAMPLED | {"acceptance": "typical-sampled"}),
    "topk": (1, GREEDY | {"acceptance": "topk:3"}),
    "distance": (1, GREEDY | {"acceptance": "distance:3"}),
}
TREES = {1: "topk:4,2,1", 4: "dynamic:9"}  # by the rows of a batch


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode as on a GPU."""
    monkeypatch.setattr(decode.loop, "host_waits", lambda device: True)
    monkeypatch.setattr(argmax, "numpy_can_read", lambda values: False)


@pytest.fixture(scope="session")
def llama() -> Any:
    """One layer, because what waits does so outside the layers."""
    return shared_model("llama", num_hidden_layers=1)


def decoded(model: Any, heads: Any, rows: int, **options: Any) -> Iterator[Step]:
    prompts = [random_ids(5 + 3 * row % 11, seed=row) for row in range(rows)]
    seeds = list(range(rows)) if options.get("do_sample") else None
    return steps(model, heads, **left_padded(prompts), seeds=seeds, **{"max_new_tokens": NEW} | options)


def most_waits(monkeypatch: pytest.MonkeyPatch, taken: Iterator[Step]) -> tuple[int, str]:
    """The most waits of a step in which no text ended, and where they are."""
    found, rows = [], 0
    with HostWaits(monkeypatch) as waits:
        next(taken)
        for _ in range(SKIPPED):
            rows = len(next(taken).ids)
        for _ in range(STEPS):
            waits.take()
            step = next(taken)
            if len(step.ids) == rows:
                found.append((waits.found.total(), waits.places()))
            rows = len(step.ids)
    return max(found)


READS_ON_HOST = pytest.mark.skipif(FIRST_TRANSFORMERS, reason="penalties of transformers 5.17 wait and make NaN")
BY_MODE = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=READS_ON_HOST if "penalties" in mode else ()) for mode in MODES]
)


def one_of(ways: Iterable[Any], mode: str, full: bool) -> list[Any]:
    """Daily, one way for each mode, in turns."""
    return list(ways) if full else [list(ways)[list(MODES).index(mode) % 2]]


@BY_MODE
def test_waits_of_a_step(llama: Any, monkeypatch: pytest.MonkeyPatch, full: bool, mode: str) -> None:
    budget, options = MODES[mode]
    heads = random_heads(llama)
    for rows in one_of(TREES, mode, full):
        tree = TREES[1 if options.get("draft") == "sample" else rows]
        waits, places = most_waits(monkeypatch, decoded(llama, heads, rows, tree=tree, **options))
        assert waits <= budget, f"{mode}, {rows} rows, {tree}: {waits} waits\n{places}"


@BY_MODE
def test_texts_do_not_depend_on_the_waits(llama: Any, monkeypatch: pytest.MonkeyPatch, full: bool, mode: str) -> None:
    """Walks that go on after their ends give the texts of walks that stop there, also with penalties and seeds."""
    heads, options = random_heads(llama), MODES[mode][1] | {"max_new_tokens": TEXT}
    longest = 0
    for rows, tree in one_of(((5, "topk:10,4,2"), (1, "dynamic:30")), mode, full):
        tree, texts = "topk:10,4,2" if options.get("draft") == "sample" else tree, []
        for waits in (True, False):
            monkeypatch.setattr(decode.loop, "host_waits", lambda device, waits=waits: waits)
            texts.append([step.ids for step in decoded(llama, heads, rows, tree=tree, **options)])
        assert texts[0] == texts[1]
        longest = max(longest, *(len(ids) for step in texts[0] for ids in step.values()))
    assert longest > 1, "nothing was accepted: no power"


def test_the_global_generator_is_where_plain_sampling_leaves_it(llama: Any) -> None:
    """What a walk draws after its end is taken back, so the next draw of the caller is that after `model.generate`."""
    heads, prompt, options = random_heads(llama), random_ids(6), SAMPLED | {"max_new_tokens": 12, "eos_token_id": None}
    torch.manual_seed(3)
    expected = plain(llama, prompt, **options), torch.rand(1)
    torch.manual_seed(3)
    out = generate(llama, heads, torch.tensor([prompt]), tree="topk:4,2,1", **options)
    left = torch.rand(1)
    assert (out[0, len(prompt) :].tolist(), left) == expected
