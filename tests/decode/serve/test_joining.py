"""Texts that join a running batch at any step are the texts that they are alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")

from decode.compiled.region import Regions
from decode.compiled.stepper import CompiledStepper
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.serve.batch import RunningBatch
from decode.serve.worker import BatchRow, BatchWorker, RowEvent
from decode.settings import Settings
from decode.strategies.contrastive import Amateur
from decode.texts import TextGenerator, stepper_for
from tests.decode.serve.server_tools import PROMPTS, admit, expected, said
from tests.decode.serve.server_tools import decode as decode_rows
from tests.helpers import plain, random_heads, random_ids, shared_model, tiny_model, weekly

GREEDY: dict[str, Any] = {"do_sample": False}
KINDS: list[dict[str, Any]] = [
    GREEDY,
    {"do_sample": True, "temperature": 0.8, "top_k": 0},
    {"do_sample": True, "temperature": 1.0, "top_k": 0},
    {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "top_k": 0},
    {"do_sample": False, "repetition_penalty": 1.4},
]


def arrivals(kinds: list[dict[str, Any]], count: int = 10) -> list[dict[str, Any]]:
    """Requests of many lengths, each with the step at which it arrives."""
    rng = random.Random(3)
    return [
        {
            "prompt": random_ids(rng.randint(1, 30), seed=number),
            "seed": number,
            "at": rng.randint(0, 3 * count // 2),
            "kwargs": kinds[number % len(kinds)] | {"max_new_tokens": rng.choice([1, 3, 8, 14]), "eos_token_id": 3},
        }
        for number in range(count)
    ]


def decode(
    model: Any,
    factory: Any,
    asked: list[dict[str, Any]],
    room: int = 4,
    changed: Any = lambda stepper: stepper,
    **how: Any,
) -> list[list[int]]:
    """Decode requests in a running batch of at most `room` texts; each joins when it arrived and there is room.

    `changed` makes other steppers of those that would be used."""
    how = {"rule": AcceptanceRule("rejection")} | how
    batch = RunningBatch(lambda requests: changed(stepper_for(model, factory, requests, **how)))
    left, running, texts, step = list(range(len(asked))), dict[int, int](), [list[int]() for _ in asked], 0
    widest = 0
    while left or running:
        joining = [number for number in left if asked[number]["at"] <= step][: room - len(running)]
        if joining:
            made = [asked[number] for number in joining]
            requests = [prepare(model, [one["prompt"]], [one["seed"]], **one["kwargs"])[0] for one in made]
            running |= dict(zip(batch.join(requests), joining, strict=True))
            left = [number for number in left if number not in joining]
        if running:
            done = batch.step()
            for row, number in list(running.items()):
                texts[number] += done.ids.get(row, [])
                if batch.sequences.finish_reason[row] is not None:
                    assert texts[number] == batch.sequences.new_ids[row]
                    del running[row]
            assert set(batch.rows) == set(running)
            widest = max(widest, len(batch.sequences))
        step += 1
    assert widest <= room
    return texts


def alone(model: Any, asked: list[dict[str, Any]]) -> list[list[int]]:
    return [plain(model, one["prompt"], seed=one["seed"], **one["kwargs"]) for one in asked]


@pytest.mark.parametrize("family", ["llama", "llama4_text", "gpt2", *weekly("gemma3_text", "deepseek_v3")])
def test_texts_are_those_of_generate(family: str) -> None:
    """Greedy and sampled texts, and texts with penalties, are decoded in one batch with one tree."""
    model, asked = shared_model(family), arrivals(KINDS)  # with fewer, no penalised text is left by others
    factory = drafter_factory(None, DrafterContext(model, random_heads(model), "topk:3,2,2"))
    texts = decode(model, factory, asked)
    assert texts == alone(model, asked)
    assert len({len(text) for text in texts}) > 2


@pytest.mark.parametrize("kind", ["", "markov", "eagle-3", "hydra", "dflash, markov"])
def test_every_drafter_goes_on_when_texts_join(kind: str, factory_of: Any) -> None:
    """With the others, texts join in test_adaptive.py."""
    model, asked = shared_model(), arrivals(KINDS, 8)
    assert decode(model, factory_of(kind) if kind else None, asked) == alone(model, asked)


def test_contrastive_texts_join() -> None:
    model, asked = shared_model(), arrivals([GREEDY], 5)
    amateur = Amateur(shared_model(seed=5))
    factory = drafter_factory("ngram", DrafterContext(model))
    together = decode(model, factory, asked, amateur=amateur)
    assert together == [decode(model, factory, [one | {"at": 0}], amateur=amateur)[0] for one in asked]
    assert together != alone(model, asked)


def test_drawn_drafts_do_not_depend_on_the_batch() -> None:
    model, asked = shared_model(), arrivals(KINDS[1:4], 6)
    factory = drafter_factory(None, DrafterContext(model, random_heads(model), "topk:3,2,2"))
    how = {"rule": AcceptanceRule("rejection", draft="sample")}
    together = decode(model, factory, asked, **how)
    assert together == [decode(model, factory, [one | {"at": 0}], **how)[0] for one in asked]


@pytest.mark.usefixtures("as_written")
def test_compiled_texts_follow_each_other_in_one_region() -> None:
    model, asked = tiny_model(), arrivals([GREEDY], 3)
    factory = drafter_factory(None, DrafterContext(model, random_heads(model), "chain:2"))
    batch = RunningBatch(lambda requests: stepper_for(model, factory, requests, AcceptanceRule("greedy"), compile=True))
    for one in asked:
        (row,) = batch.join(prepare(model, [one["prompt"]], **one["kwargs"]))
        while batch.rows:
            batch.step()
        assert batch.sequences.new_ids[row] == plain(model, one["prompt"], **one["kwargs"])
    batch.clear()
    assert len(Regions.of(model)) == 1


def test_a_failed_prefill_leaves_the_running_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared_model()
    request = {"max_new_tokens": 9, "do_sample": False}
    batch = RunningBatch(lambda requests: stepper_for(model, None, requests, AcceptanceRule("greedy")))
    (row,) = batch.join(prepare(model, [[1, 2, 3]], **request))
    batch.step()
    second = prepare(model, [[4, 5]], **request)
    with monkeypatch.context() as broken:
        broken.setattr("decode.loop.Stepper.start", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            batch.join(second)
    while batch.rows:
        batch.step()
    assert batch.sequences.new_ids[row] == plain(model, [1, 2, 3], **request)
    batch.join(prepare(model, [[1, 2, 3]], **request))
    monkeypatch.setattr("decode.session.Session.join", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        batch.join(second)
    assert (batch.rows, batch.stepper) == ([], None)


# --- the worker and the server ---------------------------------------------------------------------------------------


def test_texts_that_come_after_each_other_join_together(generator: TextGenerator) -> None:
    """Four running texts let a text wait for one step. A text that is alone does not wait."""
    worker, prompt = BatchWorker(generator, 8), generator.tokenizer(PROMPTS[0])["input_ids"]
    running = []
    for arriving in (1, 3, 1, 1, 0, 1):
        admit(worker, *(BatchRow(prompt, Settings(max_new_tokens=60), 0, lambda event: None) for _ in range(arriving)))
        running.append(len(worker.running))
        worker.step()
    assert running == [1, 4, 4, 6, 6, 6]


def test_compiled_texts_join_and_wait_while_a_step_runs(
    generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text is that of the eager server. The warm-up compiles the steps of each number of texts."""
    made, refused = list[Any](), list[int]()
    monkeypatch.setattr("decode.compiled.region.compiled", lambda step, *how: made.append(step) or step)
    stock = CompiledStepper.takes

    def takes(self: CompiledStepper, other: Any) -> bool:
        refused.append(len(self.rows))
        return len(refused) % 2 == 0 and stock(self, other)

    settings = replace(generator.settings, compile=True)
    worker = BatchWorker(replace(generator, settings=settings), 3)
    worker.warm_up(generator.tokenizer("One")["input_ids"])
    assert (len(made), worker.batch.rows) == (3, [])
    monkeypatch.setattr(CompiledStepper, "takes", takes)
    kinds = [replace(settings, max_new_tokens=count) for count in (9, 3, 5, 12, 7)]
    rows = [
        BatchRow(generator.tokenizer(PROMPTS[at % 3])["input_ids"], kind, at, lambda event: None)
        for at, kind in enumerate(kinds)
    ]
    events = decode_rows(worker, *rows)
    assert len(refused) > 1
    eager = [replace(kind, compile=False) for kind in kinds]
    assert [said(one) for one in events] == [
        expected(generator, PROMPTS[at % 3], kind) for at, kind in enumerate(eager)
    ]
    assert len(made) == 3


def test_a_short_text_overtakes_a_long_one(generator: TextGenerator) -> None:
    worker, told = BatchWorker(generator, 2), list[tuple[int, RowEvent]]()
    prompt = generator.tokenizer(PROMPTS[0])["input_ids"]
    rows = [
        BatchRow(prompt, Settings(max_new_tokens=count), 0, lambda event, row=row: told.append((row, event)))
        for row, count in enumerate((30, 3, 3))
    ]
    admit(worker, rows[0])
    worker.step()
    admit(worker, *rows[1:])
    while worker.running:
        admit(worker)
        worker.step()
    assert [row for row, event in told if event.finish_reason] == [1, 2, 0]
    for row, one in enumerate(rows):
        assert said([event for own, event in told if own == row]) == expected(generator, PROMPTS[0], one.settings)
