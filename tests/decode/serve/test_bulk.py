"""Many texts, written together: each is the text of its prompt and seed, at any width, and after a lack of memory."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from decode.cache import TreeCache
from decode.compiled.region import Regions
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.serve import bulk
from decode.serve.batch import RunningBatch
from decode.serve.bulk import MEASURED, BulkWriter, Job, Width
from decode.settings import Settings
from decode.texts import TextGenerator
from medusa.errors import RunError
from tests.helpers import plain, random_heads, random_ids, shared_model, tiny_model, weekly

NEW = 8
GREEDY, SAMPLED = Settings(max_new_tokens=NEW), Settings(max_new_tokens=NEW, temperature=1.0)
PROMPTS = [random_ids(random.Random(number).randint(1, 30), seed=number) for number in range(18)]


def written(
    settings: Settings, width: int | None = 4, source: Any = None, prompts: Any = PROMPTS, family: str = "llama"
) -> Any:
    """The texts of the prompts, by their index."""
    texts: dict[int, list[int]] = {}
    jobs = deque(
        Job(prompt, index, lambda new, reason, index=index: texts.__setitem__(index, new))
        for index, prompt in enumerate(prompts)
    )
    writer = BulkWriter(TextGenerator(shared_model(family), settings, None, source), width)
    writer.write(jobs, lambda lengths: None)
    return [texts[index] for index in range(len(prompts))]


def texts_of_generate(family: str, prompts: list[list[int]]) -> list[list[int]]:
    return [plain(shared_model(family), prompt, max_new_tokens=NEW, do_sample=False) for prompt in prompts]


@pytest.mark.parametrize("width", [5, None])
def test_greedy_texts_are_those_of_generate(width: int | None) -> None:
    assert written(GREEDY, width) == texts_of_generate("llama", PROMPTS)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, "heads") for family in ("qwen3_next", "mamba")),
        *weekly(("falcon_h1", "heads"), ("lfm2", "heads")),
        *(("qwen3_next", "mix:heads+ngram"), ("falcon_h1", None), ("mamba", "lookahead")),
    ],
)
def test_texts_join_and_leave_with_their_states(family: str, name: str | None) -> None:
    model, expected = shared_model(family), texts_of_generate(family, PROMPTS[:6])
    tree = "topk:3,2" if name in ("heads", "mix:heads+ngram") else None
    context = DrafterContext(model, random_heads(model) if tree else None, tree)
    source = None if name is None else drafter_factory(name, context)
    assert written(GREEDY, 3, source, PROMPTS[:6], family) == expected


def test_a_sampled_text_depends_on_its_prompt_and_seed_alone() -> None:
    model, prompts = shared_model(), PROMPTS[:9]
    alone = written(SAMPLED, 1, prompts=prompts)
    heads = drafter_factory(None, DrafterContext(model, random_heads(model), "topk:3,2,2"))
    for source in (None, heads, drafter_factory("ngram", DrafterContext(model))):
        assert written(SAMPLED, 5, source, prompts) == alone
    assert len({tuple(text) for text in alone}) > len(alone) // 2


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    ("sampled", "tree"), [(False, None), (True, "topk:3,2"), *weekly((False, "topk:3,2"), (True, None))]
)
def test_texts_join_compiled_steps(sampled: bool, tree: str | None) -> None:
    """A step is compiled for the whole width alone, and places without a text change nothing."""
    model, settings = shared_model("llama"), replace(SAMPLED if sampled else GREEDY, compile=True)
    Regions.of(model).clear()
    source = None if tree is None else drafter_factory(None, DrafterContext(model, random_heads(model), tree))
    alone = written(settings, 1, source) if sampled else texts_of_generate("llama", PROMPTS)
    assert written(settings, 5, source) == alone
    region = Regions.of(model)[-1][1]
    assert [step.rows for step in region.steps] == [5]


@pytest.mark.usefixtures("as_written")
def test_compiled_steps_have_no_more_rows_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings, join = shared_model("llama"), replace(GREEDY, compile=True), RunningBatch.join
    Regions.of(model).clear()
    joined: list[int] = []
    monkeypatch.setattr(RunningBatch, "join", lambda *its: (joined.append(len(its[1])), join(*its))[1])
    monkeypatch.setattr(bulk, "COMPILED_WIDTH", 16)
    monkeypatch.setattr(bulk, "FREE_PADDING", 0)  # so that few prompts are read together at first
    monkeypatch.setattr(bulk, "free_memory", lambda device: 0)
    assert written(settings, None) == texts_of_generate("llama", PROMPTS)
    rows = [step.rows for _, region in Regions.of(model) for step in region.steps]
    assert rows == [joined[0]]
    assert joined[0] < 16


@pytest.mark.usefixtures("as_written")
def test_few_texts_are_compiled_together() -> None:
    Regions.of(shared_model("llama")).clear()
    assert written(replace(GREEDY, compile=True), None, prompts=PROMPTS[:3]) == texts_of_generate("llama", PROMPTS[:3])
    assert [step.rows for step in Regions.of(shared_model("llama"))[-1][1].steps] == [3]


def test_a_job_that_ends_may_add_another() -> None:
    texts: list[list[int]] = []
    jobs: deque[Job] = deque()

    def ended(new: list[int], reason: str) -> None:
        texts.append(new)
        if len(texts) < 5:
            jobs.append(Job([1, *new], 0, ended))

    jobs.append(Job([1], 0, ended))
    BulkWriter(TextGenerator(shared_model(), GREEDY)).write(jobs, lambda lengths: None)
    assert len(texts) == 5
    assert texts[1:2] == texts_of_generate("llama", [[1, *texts[0]]])


def test_prompts_of_different_lengths_are_read_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise most of what is read would be padding."""
    expected, join, joined = texts_of_generate("llama", PROMPTS), RunningBatch.join, list[list[int]]()

    def note(batch: RunningBatch, requests: Any) -> Any:
        joined.append([len(request.prompt) for request in requests])
        return join(batch, requests)

    monkeypatch.setattr(bulk, "FREE_PADDING", 2)
    monkeypatch.setattr(RunningBatch, "join", note)
    assert written(GREEDY, 16) == expected
    assert len(joined) > 1
    for lengths in joined:
        assert sum(max(lengths) - length for length in lengths) <= max(2, sum(lengths) / 4)


@pytest.mark.parametrize("fails", ["join", "step"])
def test_a_width_that_memory_does_not_hold_is_halved(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, once = written(SAMPLED), getattr(RunningBatch, fails)
    widths = []

    def of_four(batch: RunningBatch, *args: Any) -> Any:
        widths.append(len(batch.rows) + len(*args) if args else len(batch.rows))
        if widths[-1] > 4:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return once(batch, *args)

    monkeypatch.setattr(RunningBatch, fails, of_four)
    assert written(SAMPLED, 16) == expected
    assert widths[0] == 16
    assert max(widths[3:]) <= 4


@pytest.mark.parametrize("place", ["reserve", "memory"])
def test_a_lack_of_memory_for_reserved_rows_loses_no_text(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that were about to join go back; numpy's own error becomes PyTorch's."""
    expected, failed, reserve, zeros = written(SAMPLED), list[int](), TreeCache.reserve, np.zeros

    def once(call: Any, error: Exception) -> Any:
        def of(*args: Any, **kwargs: Any) -> Any:
            if len(failed) < 1:
                failed.append(1)
                raise error
            return call(*args, **kwargs)

        return of

    if place == "reserve":
        lack = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
        monkeypatch.setattr(TreeCache, "reserve", once(reserve, lack))
    else:
        monkeypatch.setattr(np, "zeros", once(zeros, MemoryError()))
    assert written(SAMPLED, 16) == expected
    assert failed


def test_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningBatch, "step", lambda batch: torch.zeros(2)[3])
    with pytest.raises(IndexError):
        written(GREEDY)


def test_without_free_memory_the_width_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of ended texts is used again, so it limits nothing."""
    monkeypatch.setattr(bulk, "free_memory", lambda device: 0)
    widths, step = [], RunningBatch.step
    monkeypatch.setattr(RunningBatch, "step", lambda batch: (widths.append(len(batch.rows)), step(batch))[1])
    assert written(GREEDY, None, prompts=PROMPTS * 4) == texts_of_generate("llama", PROMPTS) * 4
    assert max(widths) == bulk.FIRST_WIDTH


def test_later_turns_do_not_outgrow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 8 to 80 tokens, of which only the first are known at the start: fewer and fewer texts fit."""
    monkeypatch.setattr("decode.cache.MIN_GROWTH", 8)
    monkeypatch.setattr("decode.cache.LARGE_BYTES", 0)
    texts: dict[tuple[int, int], list[int]] = {}
    jobs: deque[Job] = deque()

    def add(row: int, turn: int, prompt: list[int]) -> None:
        def ended(new: list[int], reason: str) -> None:
            texts[row, turn] = new
            if turn < 6:
                add(row, turn + 1, prompt + new + [1, 2, 3, 4])

        jobs.append(Job(prompt, row, ended))

    for row in range(12):
        add(row, 0, random_ids(8, seed=row))
    writer = BulkWriter(TextGenerator(shared_model(), GREEDY), 12)
    held, step = [], RunningBatch.step

    def note(batch: RunningBatch) -> Any:
        found = step(batch)
        held.append(sum(cache.num_bytes for cache in writer._caches) / writer.memory)
        return found

    monkeypatch.setattr(RunningBatch, "step", note)
    monkeypatch.setattr(bulk, "free_memory", lambda device: 0)
    writer.write(jobs, lambda lengths: None)
    assert len(texts) == 12 * 7
    assert max(held) <= 1
    assert 1 <= writer.width.rows < 12
    row, prompt = 5, random_ids(8, seed=5)
    for turn in range(7):
        assert [texts[row, turn]] == texts_of_generate("llama", [prompt])
        prompt = prompt + texts[row, turn] + [1, 2, 3, 4]


def test_texts_without_probabilities_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    jobs = deque(Job([1, 2], seed, lambda new, reason: None) for seed in range(20))
    with pytest.raises(RunError, match="NaN"):
        BulkWriter(TextGenerator(model, SAMPLED)).write(jobs, lambda lengths: None)


def speeds(width: Width, speed: Any) -> list[int]:
    """The widths of 40 steps for each doubling, where `speed` is the tokens a second of a number of texts."""
    found = []
    for _ in range(12 * MEASURED):
        found.append(width.rows)
        width.add(width.rows, width.rows, width.rows / speed(width.rows))
    return found


def test_the_width_doubles_as_long_as_it_pays() -> None:
    assert speeds(Width(None), lambda rows: rows)[-1] == bulk.MOST
    # A step takes 40 ms and 1 ms for each text: 64 -> 128 texts gains 20 %, 128 -> 256 gains 13, 256 -> 512 7.
    assert speeds(Width(None), lambda rows: rows / (40 + rows))[-1] == 256
    assert set(speeds(Width(None), lambda rows: 1.0)) == {bulk.FIRST_WIDTH, 2 * bulk.FIRST_WIDTH}
    assert set(speeds(Width(6), lambda rows: rows)) == {6}
    limited = Width(None)
    limited.limit(40)
    assert speeds(limited, lambda rows: rows)[-1] == 40
    limited.weigh(100)
    limited.limit(8)
    limited.weigh(100)
    assert limited.rows == 8
