"""Running batches of compiled steps: texts join and leave, and each is the text that it is alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from decode.compiled import region
from decode.compiled.region import Regions
from decode.compiled.stepper import CompiledStepper, _has_compiler, sizes_of
from decode.drafters.trained_heads import TrainedHeads
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.serve.batch import RunningBatch
from decode.settings import CUDA_GRAPHS
from decode.texts import stepper_for
from medusa import Tree
from tests.helpers import FORMS, plain, random_heads, random_ids, random_tree, tiny_model, weekly

GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: list[dict[str, Any]] = [
    {"do_sample": True, "temperature": 0.8, "top_k": 0},
    {"do_sample": True, "temperature": 1.3, "top_p": 0.9, "top_k": 0},
]
KINDS = [GREEDY, *SAMPLED, {"do_sample": False, "repetition_penalty": 1.4}]
TREE = random_tree(6, max_depth=3)
ROOM = 4


pytestmark = pytest.mark.usefixtures("short_windows")


def batch_of(
    model: Any, heads: Any, room: int | None = ROOM, tree: Any = TREE, graphs: str = CUDA_GRAPHS[0]
) -> RunningBatch:
    factory, rule = None if heads is None else TrainedHeads(heads, tree), AcceptanceRule("rejection")
    sizes = None if room is None else sizes_of(room)
    return RunningBatch(lambda requests: stepper_for(model, factory, requests, rule, compile=graphs, sizes=sizes))


def requests_of(model: Any, number: int, options: dict[str, Any], length: int, limit: int) -> list[Any]:
    prompt = random_ids(length, seed=number)
    return prepare(model, [prompt], [number], max_new_tokens=limit, eos_token_id=None, **options)


def written(batch: RunningBatch, rows: list[int]) -> list[list[int]]:
    """Decode until all texts have ended; returns those of `rows`."""
    while batch.rows:
        batch.step()
    return [batch.sequences.new_ids[row] for row in rows]


def alone(model: Any, heads: Any, requests: list[Any], tree: Any = TREE) -> list[int]:
    batch = batch_of(model, heads, None, tree, "off")
    (text,) = written(batch, batch.join(requests))
    batch.clear()
    return text


def come_and_go(batch: RunningBatch, asked: list[list[Any]], room: int, seed: int = 0) -> list[list[int]]:
    """Let texts join at random steps, some of them together; returns all texts."""
    rng, left, running, texts = random.Random(seed), list(range(len(asked))), dict[int, int](), dict[int, list[int]]()
    while left or running:
        joining = left[: min(rng.choice([0, 0, 1, 2]), room - len(running))]
        if joining:
            rows = batch.join([request for number in joining for request in asked[number]])
            running |= dict(zip(rows, joining, strict=False))
            left = left[len(rows) :]  # none, while a step runs
        if running:
            batch.step()
        for row, number in list(running.items()):
            if batch.sequences.finish_reason[row] is not None:
                texts[number] = batch.sequences.new_ids[row]
                del running[row]
    return [texts[number] for number in range(len(asked))]


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    ("kind", "prefix_layers", "family"),
    [("medusa", 1, "gemma3_text"), ("eagle-3", 0, "llama"), *weekly(("medusa", 0, "llama"), ("eagle", 0, "llama"))],
)
def test_texts_that_come_and_go_are_those_alone(kind: str, prefix_layers: int, family: str) -> None:
    """Their lengths, windows and caches differ, and greedy, penalised and sampled texts are in one batch."""
    model = tiny_model(family, max_position_embeddings=256)
    heads = random_heads(model, **FORMS.get(kind, {"kind": kind}), prefix_layers=prefix_layers)
    rng = random.Random(1)
    lengths = [(rng.randint(1, 40), rng.choice([1, 5, 12, 30])) for _ in range(9)]

    def asked() -> list[list[Any]]:
        return [requests_of(model, at, KINDS[at % len(KINDS)], *sizes) for at, sizes in enumerate(lengths)]

    expected = [alone(model, heads, requests) for requests in asked()]
    batch = batch_of(model, heads)
    assert come_and_go(batch, asked(), ROOM) == expected
    assert come_and_go(batch, asked(), ROOM, seed=1) == expected, "in the region of the first texts"
    batch.clear()
    assert sum(len(one.sizes) > 1 for _, one in Regions.of(model)) == 1, "one region of batches"
    greedy = range(0, len(lengths), len(KINDS))
    for at in greedy:
        length, limit = lengths[at]
        assert expected[at] == plain(model, random_ids(length, seed=at), max_new_tokens=limit, eos_token_id=None)


@pytest.mark.usefixtures("as_written")
def test_a_text_that_leaves_changes_no_other() -> None:
    """The last text takes its place. A text that joins finds NaN in the row of another one."""
    model = tiny_model("llama", num_hidden_layers=1)
    heads = random_heads(model, **FORMS["eagle"])
    asked, again = ([requests_of(model, at, KINDS[at % 4], 5 + at, 24) for at in range(5)] for _ in range(2))
    expected = [alone(model, heads, requests) for requests in again]
    batch = batch_of(model, heads)
    rows = batch.join([request for requests in asked[:4] for request in requests])
    batch.step()
    assert batch.stepper is not None
    batch.end(rows[0])
    batch.step()
    batch.step()
    assert batch.rows == [rows[3], rows[1], rows[2]]
    caches = batch.stepper.state.caches
    assert [one.filled.tolist()[3:] for one in caches] == [[0]] * 2, "the step has seen a row without a text"
    with torch.inference_mode():
        for buffer in (buffer for one in caches for buffer in one.buffers):
            buffer[:, 3] = torch.nan
    (last,) = batch.join(asked[4])
    assert written(batch, [*rows[1:], last]) == expected[1:]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that are compiled from now on; they run as they are written."""
    made = list[Any]()
    monkeypatch.setattr(region, "compiled", lambda step, *how: made.append(step) or step)
    return made


def test_steps_are_compiled_once_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mix of temperatures needs one kind of sampling, which greedy texts then take, too."""
    made, model = counted(monkeypatch), tiny_model("llama", num_hidden_layers=1)
    batch = batch_of(model, random_heads(model), 8)
    for turn in range(2):
        options = [GREEDY if turn and at % 3 == 0 else SAMPLED[0] | {"temperature": 0.5 + at / 10} for at in range(14)]
        asked = [requests_of(model, at, one, 3 + at, 16) for at, one in enumerate(options)]
        come_and_go(batch, asked, 8, seed=turn)
        rows = batch.join([request for at in range(8) for request in requests_of(model, at, options[at], 4, 9)])
        written(batch, rows)
        assert len(made) <= 4
    kept = batch.stepper
    assert isinstance(kept, CompiledStepper)
    assert kept.region is not None
    assert {step.rows for step in kept.region.steps} <= {1, 2, 4, 8}
    assert len({step.rows for step in kept.region.steps}) == len(made), "no number of rows twice"


def test_another_kind_of_sampling_is_compiled_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, model = counted(monkeypatch), tiny_model("llama", num_hidden_layers=1)
    heads = random_heads(model)
    expected = alone(model, heads, requests_of(model, 0, GREEDY, 4, 30))
    batch = batch_of(model, heads, 1 + 1)
    made.clear()
    rows = batch.join(requests_of(model, 0, GREEDY, 4, 30))
    batch.step()
    batch.join(requests_of(model, 1, SAMPLED[1], 4, 6))
    batch.step()
    assert len(made) == 2, "one row greedy, two rows with a cut"
    assert written(batch, rows) == [expected]
    assert len(made) == 2, "the greedy text goes on in its first step"
    for options in (GREEDY, SAMPLED[0]):
        batch.join(requests_of(model, 2, options, 4, 9) + requests_of(model, 3, options, 5, 9))
        batch.step()
        assert len(made) == 2, "the code with a cut does for them"
        batch.clear()
    written(batch, batch.join(requests_of(model, 2, SAMPLED[0], 4, 6)))
    assert len(made) == 3, "alone, the greedy code does not"


@pytest.mark.usefixtures("as_written")
def test_a_failed_prefill_leaves_the_running_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    heads = random_heads(model)
    expected = alone(model, heads, requests_of(model, 0, SAMPLED[0], 4, 12))
    batch = batch_of(model, heads)
    rows = batch.join(requests_of(model, 0, SAMPLED[0], 4, 12))
    batch.step()
    second = requests_of(model, 1, SAMPLED[0], 4, 12)
    with monkeypatch.context() as broken:
        broken.setattr("decode.session.Session.prefill", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            batch.join(second)
    with pytest.raises(RuntimeError, match="full batch"):
        batch.join(second * ROOM)
    assert written(batch, rows) == [expected]
    rows = batch.join(second)
    batch.step()
    monkeypatch.setattr("decode.cache.TreeCache.join", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        batch.join(second)
    assert (batch.rows, batch.stepper) == ([], None)


@pytest.mark.usefixtures("as_written")
def test_no_text_joins_fixed_rows() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    batch = batch_of(model, None, None)
    rows = batch.join(requests_of(model, 0, GREEDY, 4, 12))
    with pytest.raises(RuntimeError, match="rows are fixed"):
        batch.join(requests_of(model, 1, GREEDY, 4, 12))
    assert written(batch, rows) == [plain(model, random_ids(4, seed=0), max_new_tokens=12, eos_token_id=None)]


@pytest.mark.parametrize(("room", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_numbers_of_rows(room: int, sizes: tuple[int, ...]) -> None:
    assert sizes_of(room) == sizes


@pytest.mark.full
def test_no_graph_break(traced: list[tuple[int, ...]]) -> None:
    """Each number of rows is traced once, and all of them read and write the same memory."""
    model = tiny_model("llama", num_hidden_layers=1)
    heads, tree = random_heads(model, **FORMS["eagle, window"]), Tree.chain(2)
    counters = torch._dynamo.utils.counters["stats"]
    asked = [[requests_of(model, at, SAMPLED[1], 20 + at, 24) for at in range(2)] for _ in range(2)]
    batch, before = batch_of(model, heads, 2, tree), counters["unique_graphs"]
    for requests in asked:
        for one in requests:
            batch.join(one)
            batch.step()
            batch.step()
        while batch.rows:
            batch.step()
    assert counters["unique_graphs"] == before + 2
    memory = [set(found) for found in traced]
    assert all(len(found & memory[-1]) > 8 for found in memory)


@pytest.mark.full
@pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler")
def test_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy text joins a sampled one, and goes on in the same code when that has ended; two steps are compiled."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    heads, tree = random_heads(model, **FORMS["eagle"]), Tree.chain(2)
    first, second = (SAMPLED[1], 24, 20), (GREEDY, 20, 40)
    with monkeypatch.context() as patch:
        counted(patch)
        expected = [alone(model, heads, requests_of(model, at, *one), tree) for at, one in enumerate((first, second))]
    batch = batch_of(model, heads, 2, tree)
    rows = batch.join(requests_of(model, 0, *first))
    batch.step()
    rows += batch.join(requests_of(model, 1, *second))
    assert written(batch, rows) == expected
    assert isinstance(batch.stepper, CompiledStepper)
    assert batch.stepper.region is not None
    assert [step.rows for step in batch.stepper.region.steps] == [1, 2]
