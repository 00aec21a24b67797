"""How texts of the running batch end: at stop strings as in `model.generate`, and alone if they are undefined."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

pytest.importorskip("prometheus_client", reason="needs the extra serve")

from chat_families import byte_tokenizer
from decode.drafters import drafter_factory
from decode.drafters.base import DrafterContext
from decode.sequences import AHEAD, Request, Sequences
from decode.serve.worker import BatchRow, BatchWorker
from decode.settings import Settings
from decode.texts import TextGenerator
from medusa.errors import RunError
from medusa.records.pieces import TextStream, joined
from tests.decode.serve.server_tools import begin, decode, said
from tests.decode.test_stop_strings import named, without_names
from tests.helpers import plain, random_heads, random_ids, tiny_model

SAMPLED = Settings(max_new_tokens=30, temperature=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    """Its model writes any of the tokens, also special ones."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    source = drafter_factory(None, DrafterContext(model, random_heads(model), "topk:3,2"))
    return TextGenerator(model, SAMPLED, tokenizer, source)


def row_of(seed: int, settings: Settings = SAMPLED) -> BatchRow:
    return BatchRow(random_ids(5 + seed, seed), settings, seed, lambda event: None)


def reference(generator: TextGenerator, row: BatchRow, **more: Any) -> list[int]:
    kwargs = replace(row.settings, stop=()).generate_kwargs() | more
    return plain(generator.model, row.prompt, row.seed, **kwargs)


def stops(generator: TextGenerator) -> Iterator[tuple[BatchRow, str]]:
    """Rows, each with a stop string that its text contains: a special token, alone or beside others, or other text."""
    rng, special = random.Random(0), set(generator.tokenizer.all_special_ids)
    for seed in range(10):
        ids = reference(generator, row_of(seed))
        places = [place for place, token in enumerate(ids) if 1 < place < 25 and token in special]
        place = places[0] if places else rng.randrange(3, 20)
        count = rng.choice([1, 2])
        string = named(
            generator.tokenizer, ids[place : place + count] if seed % 2 else ids[place - count + 1 : place + 1]
        )
        if "\ufffd" not in string:
            yield row_of(seed, replace(SAMPLED, stop=(string,))), string


def test_stop_strings_end_a_text_as_in_generate_in_every_way(generator: TextGenerator) -> None:
    rows, strings = map(list, zip(*stops(generator), strict=True))
    special = sum("<" in string for string in strings)
    assert special > 3
    assert len(strings) - special > 1
    events = decode(BatchWorker(generator, 4), *rows)
    for row, string, own in zip(rows, strings, events, strict=True):
        ids = reference(generator, row, stop_strings=[string], tokenizer=generator.tokenizer)
        assert (row.new_tokens, own[-1].finish_reason) == (len(ids), "stop")
        whole = named(generator.tokenizer, ids)
        shown = without_names(generator.tokenizer, whole, whole.index(string))
        assert said(own) == shown
        kept = TextStream(generator.tokenizer, [string], keeps_special=True)  # as for tool calls
        assert joined([*kept.step(ids), *kept.end()]) == whole[: whole.index(string)]
        run = begin(generator, row.prompt, row.settings, row.seed)  # as the chat and `medusa generate` do
        assert [token for step in run for token in step.ids[0]] == ids
        assert run.results[0].finish_reason == "stop"
        assert run.results[0].to_json(generator.tokenizer, row.settings.stop)["text"] == shown


@dataclass
class Breaks(LogitsProcessor):
    """Makes all scores `value` as soon as a text has `length` tokens."""

    value: float
    length: int

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores if input_ids.shape[1] < self.length else torch.full_like(scores, self.value)


@dataclass(eq=False)
class BreakingRow(BatchRow):
    value: float = float("nan")

    def request(self, generator: TextGenerator) -> Request:
        request = super().request(generator)
        breaks = Breaks(self.value, len(self.prompt) + 4)
        return request._replace(processors=LogitsProcessorList([*request.processors, breaks]))


def test_a_text_that_cannot_be_scored_ends_alone(generator: TextGenerator, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise torch.OutOfMemoryError("too long")

    monkeypatch.setattr("decode.serve.worker.scored", fail)
    row, other = row_of(0), row_of(1)
    row.scores = 0
    own, others = decode(BatchWorker(generator, 2), row, other)
    assert isinstance(own[-1].error, torch.OutOfMemoryError)
    assert others[-1].new_ids == tuple(reference(generator, other))


@pytest.mark.parametrize(
    ("how", "value"),
    [("heads", "nan"), ("heads", "inf"), ("heads", "-inf"), ("adaptive", "nan"), ("plain", "-inf"), ("drawn", "nan")],
)
def test_an_undefined_text_ends_alone(generator: TextGenerator, how: str, value: str) -> None:
    """The text of a user's processor, of a grammar that allows nothing, or of a temperature that is too small."""
    source, settings = generator.source, SAMPLED
    if how == "plain":
        source = None
    elif how == "drawn":
        settings = replace(SAMPLED, draft="sample")
    made = replace(generator, source=source)
    fine = [row_of(seed, replace(settings, max_new_tokens=12)) for seed in range(3)]
    wrong = BreakingRow(random_ids(9, 9), settings, 9, lambda event: None, value=float(value))
    cold = row_of(4, replace(settings, temperature=1e-320))
    worker = BatchWorker(made, 4, adapts=how == "adaptive")
    events = decode(worker, fine[0], wrong, fine[1], cold, fine[2])
    for broken in (events[1], events[3]):
        assert isinstance(broken[-1].error, RunError)
        assert "probabilities that are NaN" in str(broken[-1].error)
        assert not any(event.error for event in broken[:-1])
    assert (wrong.new_tokens, cold.new_tokens) == (4, 0)
    for row, own in zip(fine, (events[0], events[2], events[4]), strict=True):
        assert own[-1].finish_reason == "length"
        text = said(own)
        if how == "drawn":  # another sample, which does not depend on the batch
            assert text == said(decode(BatchWorker(made, 4), replace(row, new_tokens=0))[0])
        else:
            ids = reference(generator, row)
            assert text == generator.tokenizer.decode(ids, skip_special_tokens=True)


def test_memory_does_not_depend_on_the_tokens_that_are_allowed() -> None:
    """Models without a context allow any number; the buffer of the texts grows with the text, also between others."""
    requests = [
        Request([row, 1, 2], LogitsProcessorList(), StoppingCriteriaList(), GenerationConfig(), 10**15)
        for row in range(3)
    ]
    texts, rng = Sequences(requests[:2], None, torch.device("cpu"), slack=4), random.Random(0)
    texts.take(Sequences(requests[2:], None, torch.device("cpu")), [2])
    expected, more = [list(request.prompt) for request in requests], torch.tensor([7, 8, 9])
    for _ in range(60):
        for row in (0, 2):
            tokens = [rng.randrange(50) for _ in range(rng.randint(20, 90))]
            assert texts.extend(row, tokens) == tokens
            expected[row] += tokens
            if rng.random() < 0.3:
                assert texts.prefix(row, more).tolist() == [[*expected[row], 7, 8, 9]]
    assert [texts.prefix(row).tolist() for row in range(3)] == [[own] for own in expected]
    assert min(map(len, expected[::2])) > 2 * AHEAD > texts.buffer.shape[1] / 4
