"""CUDA graphs of compiled steps, on a CPU: a stand-in records a step's operations and replays them on the same memory.

As on a GPU, a captured operation does not run, and a replay reads and writes the memory that the capture saw, whatever
objects hold it by then. So a step with an input that is not static writes another text."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import StoppingCriteria

from decode import cache, generate, session
from decode.bench import benchmark
from decode.bench.benchmark import Contender, run_rounds
from decode.bench.methods import plain_method
from decode.compiled import graphs, prompts, sampling, stepper
from decode.compiled.graphs import GraphedStep, graphs_for
from decode.compiled.region import Region, Regions
from decode.compiled.sampling import Sampler
from decode.compiled.stepper import CompiledStepper
from decode.reader import Reader
from decode.request import prepare
from decode.serve import bulk
from decode.serve.bulk import BulkWriter, Job
from decode.settings import CUDA_GRAPHS, DecodingOptions, Settings
from decode.step import State
from decode.texts import TextGenerator
from medusa import Tree
from tests.decode.compiled.test_running import KINDS, ROOM, alone, batch_of, come_and_go, requests_of, written
from tests.helpers import (
    FORMS,
    at_once,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    run_as_written,
    tiny_model,
    weekly,
)

READS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)  # operations that wait for the device
MADE = torch.ops.aten.lift_fresh  # of numbers of the host; a compiler makes a constant of it, an eager capture fails


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FakeGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    made: list[FakeGraph]

    def __init__(self) -> None:
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0
        self.made.append(self)

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, results in self.operations:
            for old, new in zip(results, tensors(function(*args, **kwargs)), strict=True):
                if address(old) != address(new):
                    old.copy_(new)


class Recorder(TorchDispatchMode):
    """Records operations, and undoes at its end what they did to memory from before."""

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()
        self.graph, self.own, self.before = graph, set[int](), dict[int, tuple[Tensor, Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in READS:
            raise RuntimeError(f"{func} cannot be captured")
        inputs = tensors((args, kwargs))
        for tensor in inputs if func._schema.is_mutable else ():
            if address(tensor) not in self.own:
                whole = tensor.as_strided((tensor.untyped_storage().size() // tensor.itemsize,), (1,), 0)
                self.before.setdefault(address(tensor), (whole, whole.clone()))
        found = func(*args, **(kwargs or {}))
        self.own |= {address(one) for one in tensors(found)} - {address(one) for one in inputs}
        self.graph.operations.append((func, args, kwargs or {}, tensors(found)))
        return found

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for tensor, old in self.before.values():
            tensor.copy_(old)


class FakeEvent:
    """Stands in for `torch.cuda.Event`, and logs when results are sent and when they are read."""

    log: list[str]

    def record(self, stream: Any) -> None:
        self.log.append("sent")

    def synchronize(self) -> None:
        self.log.append("read")


@contextmanager
def capturing(graph: FakeGraph, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
    """Stands in for `torch.cuda.graph`."""
    assert capture_error_mode == "thread_local", "other threads may allocate memory meanwhile"
    assert graphs.CAPTURING.locked(), "one capture at a time"
    assert stream == ("stream", torch.cuda.current_device()), "a stream of the device whose kernels are captured"
    before = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    with Recorder(graph):
        yield
    torch.cuda.set_stream(before)  # as in PyTorch, not after an error that ends the capture


@pytest.fixture
def host_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host often decide on tokens, and steps soon start ahead again."""
    monkeypatch.setattr(sampling, "CANDIDATES", 8)
    monkeypatch.setattr(stepper, "PATIENCE", 1)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> type[FakeGraph]:
    """A CPU that can capture steps; windows and caches grow while short texts are written."""
    FakeGraph.made, FakeEvent.log = [], []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    current = [torch.device("cuda:7")]  # another device than the steps'

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream", device))
    streams = ["the default stream"]

    @contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        before = streams[0]
        streams[0] = stream
        try:
            yield
        finally:
            streams[0] = before

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    for module in (graphs, benchmark):
        monkeypatch.setattr(module, "possible", lambda device: True)
    run_as_written(monkeypatch)
    monkeypatch.setattr(cache, "BLOCK", 16)
    monkeypatch.setattr(cache, "MIN_GROWTH", 16)
    monkeypatch.setattr(session, "AHEAD", 4)
    monkeypatch.setattr(prompts, "BUCKETS", (8, 16, 32))
    # A replay repeats operations of PyTorch, and nothing else.
    monkeypatch.setattr("medusa.argmax.numpy_can_read", lambda values: False)
    return FakeGraph


CPU = torch.device("cpu")
OWN: dict[str, Any] = {"compile": True, "cuda_graphs": "own"}


def ids_of(*given: Any, **options: Any) -> Tensor:
    """What `generate` returns, as ids."""
    out = generate(*given, **options)
    assert isinstance(out, Tensor)
    return out


def texts(model: Any, heads: Any, prompts: list[list[int]], tree: Any, **options: Any) -> list[list[int]]:
    inputs = left_padded(prompts)
    out = ids_of(model, heads, **inputs, tree=tree, eos_token_id=None, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(
    ("kind", "tree"),
    [("recurrent", random_tree(6, max_depth=3)), ("eagle", "dynamic:6"), *weekly(("medusa", "dynamic:6"))],
)
def test_replayed_steps_write_the_same_text(kind: str, tree: Any, fake_cuda: type[FakeGraph]) -> None:
    """Texts outgrow windows and caches, rows end one after the other, and other texts follow in the same region."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    heads = random_heads(model, kind=kind)
    for seed, limit in ((0, 24), (1, 8), (2, 36)):
        prompts = [random_ids(length, seed=length + seed) for length in (3, 9)]
        found = texts(model, heads, prompts, tree, max_new_tokens=limit, do_sample=False, **OWN)
        assert found == [plain(model, prompt, max_new_tokens=limit, eos_token_id=None) for prompt in prompts]
    assert len(Regions.of(model)) == 1
    assert len(fake_cuda.made) > 4
    assert sum(one.replays for one in fake_cuda.made) > 30, "most steps are replays"


@pytest.mark.filterwarnings("ignore:steps run without CUDA graphs")
@pytest.mark.parametrize(
    ("family", "kind", "lengths"),
    [
        ("llama", "medusa", ([40], [32], [8], [9])),
        *weekly(("llama", "eagle-3", ([17], [3]))),
        ("mistral", "eagle", ([11, 32], [3, 9])),
        ("gpt2", "medusa", ([30], [6])),
    ],
)
def test_prompts_are_read_by_graphs(
    family: str, kind: str, lengths: tuple[list[int], ...], fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths around the ends of buckets follow each other. From the fourth time on, no forward is launched."""
    settings: dict[str, Any] = {"sliding_window": 5} if family == "mistral" else {}
    model = tiny_model(family, max_position_embeddings=60 if family == "llama" else 40, **settings)
    heads = random_heads(model, **FORMS[kind], prefix_layers=int(kind == "eagle"))
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    monkeypatch.setattr("tests.decode.compiled.test_graphs.READS", (*READS, MADE))
    eager, stock = list[int](), Reader.prefill
    monkeypatch.setattr(Reader, "prefill", lambda *args: (eager.append(max(args[2])), stock(*args))[1])
    for turn in range(4):
        eager.clear()
        for batch in lengths:
            prompts = [random_ids(length, seed=length + turn) for length in batch]
            written = [plain(model, prompt, eos_token_id=None, **options) for prompt in prompts]
            before = sum(one.replays for one in fake_cuda.made)
            assert texts(model, heads, prompts, "chain", **options, **OWN) == written
            assert turn < 3 or sum(one.replays for one in fake_cuda.made) > before
    assert eager == [max(batch) for batch in lengths if max(batch) > 32]
    [(_, region)] = Regions.of(model)
    assert region.prompts is not None
    used = {next(size for size in (8, 16, 32) if max(batch) <= size) for batch in lengths if max(batch) <= 32}
    assert {size for size, graph in region.prompts.graphed.graphs.items() if graph} == used


class Counter(TorchDispatchMode):
    """Counts the operations that the host asks for, without those of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.counts = 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += self.counts
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("options", "most"), [({"do_sample": False}, 75), ({"do_sample": True, "top_p": 0.9}, 115)])
def test_a_text_starts_with_few_operations(
    options: dict[str, Any], most: int, fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the call to its first step, as many for any number of layers; half of them start no kernel."""
    counter, replay, step, counts = Counter(), FakeGraph.replay, Region.__call__, list[int]()

    def uncounted(graph: FakeGraph) -> None:
        counter.counts, before = False, counter.counts
        replay(graph)
        counter.counts = before

    def stepped(region: Region) -> Tensor:
        counter.counts = False
        return step(region)

    monkeypatch.setattr(FakeGraph, "replay", uncounted)
    monkeypatch.setattr(Region, "__call__", stepped)
    for layers in (1, 3):
        model = tiny_model("llama", num_hidden_layers=layers, max_position_embeddings=256)
        call = partial(ids_of, model, random_heads(model, kind="markov"), max_new_tokens=6, tree="dynamic:6", **OWN)
        for turn in range(4):
            counter.count, counter.counts = 0, True
            with counter:
                call(torch.tensor([random_ids(9, seed=turn)]), seeds=[turn], eos_token_id=None, **options)
        counts.append(counter.count)
    assert 0 < counts[0] == counts[1] < most


@pytest.mark.parametrize("case", ["a model that runs whole", "autocast", "many tokens", "a short context"])
def test_some_prompts_are_read_without_graphs(
    case: str, fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "gemma2" if case == "a model that runs whole" else "llama"
    model = tiny_model(family, max_position_embeddings=12 if case == "a short context" else 60)
    monkeypatch.setattr(prompts, "MOST_TOKENS", 15 if case == "many tokens" else 64)
    heads, options = random_heads(model), {"max_new_tokens": 2, "do_sample": False}
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        for _ in range(2):
            texts(model, heads, [random_ids(9)], "chain", **options, **OWN)
    [(_, region)] = Regions.of(model)
    assert region.prompts is not None
    assert not region.prompts.graphed.graphs


def test_replayed_steps_draw_new_random_numbers(fake_cuda: type[FakeGraph]) -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    heads, tree = random_heads(model), random_tree(6, max_depth=3)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seeds": [3, 4]}
    prompts = [random_ids(5), random_ids(7)]
    found = texts(model, heads, prompts, tree, **options, **OWN)
    assert any(one.replays for one in fake_cuda.made)
    assert found == texts(model, heads, prompts, tree, **options, compile=True, cuda_graphs="off")


class After(StoppingCriteria):
    """Ends a text at a token, as the host decides."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] == self.token


OVERLAPPED: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.9, "seeds": [1, 2, 3]},
    "all accepted": {"do_sample": True, "temperature": 1e3, "acceptance": "typical", "epsilon": 1e-9, "delta": 1e-9},
    "tokens of the host": {"do_sample": True, "top_p": 0.7, "top_k": 0, "repetition_penalty": 1.3, "seeds": [4, 5, 6]},
}


@pytest.mark.usefixtures("host_decides")
@pytest.mark.parametrize("options", OVERLAPPED.values(), ids=OVERLAPPED)
def test_texts_are_equal_though_their_ends_are_seen_a_step_late(
    options: dict[str, Any], fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at different steps: by EOS within a step, by a criterion of the host, or by length.

    Each step has room for its nodes after what the step before has accepted, which the host does not know yet."""
    stock = Region.__call__

    def with_room(self: Region) -> Tensor:
        filled = [int(self.caches[0].filled[row]) for row in self.state.rows]
        assert max(filled) + self.nodes <= self.caches[0].width
        return stock(self)

    monkeypatch.setattr(Region, "__call__", with_room)
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    batch = left_padded([random_ids(length, seed=length) for length in (3, 9, 6)])
    call = partial(ids_of, model, random_heads(model), **batch, tree="chain", max_new_tokens=26, **options)
    width, every = batch["input_ids"].shape[1], call(compile=True, cuda_graphs="off", eos_token_id=None)
    eos, stop = int(every[0, width + 5]), int(every[1, width + 13])
    ends: dict[str, Any] = {"eos_token_id": eos, "pad_token_id": 0, "stopping_criteria": [After(stop)]}
    expected = call(compile=True, cuda_graphs="off", **ends)
    assert not torch.equal(expected[:, : width + 26], every[:, : expected.shape[1]])
    assert not FakeEvent.log
    for _ in range(2):
        assert torch.equal(expected, call(**OWN, **ends))
    assert "sent sent read" in " ".join(FakeEvent.log)


@pytest.mark.parametrize("ends", [False, True])
def test_a_step_starts_before_the_host_reads_the_one_before(ends: bool, fake_cuda: type[FakeGraph]) -> None:
    """Only an end that the host cannot foresee costs a step more."""
    model, prompt = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256), random_ids(5)
    written = plain(model, prompt, max_new_tokens=60, eos_token_id=None)
    end = next(at for at in range(20, 60) if written[at] not in written[:at]) if ends else 59
    options: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": written[end] if ends else None}
    ids, heads = torch.tensor([prompt]), random_heads(model)
    found = ids_of(model, heads, ids, tree=Tree.chain(0), do_sample=False, **OWN, **options)
    assert found[0, 5:].tolist() == written[: end + 1]
    log, steps = FakeEvent.log, end  # the last token needs no step
    assert log.count("sent") == log.count("read") == steps + ends
    unread = [log[:at].count("sent") - log[:at].count("read") for at in range(len(log))]
    assert max(unread) == 2
    assert unread.count(0) < 10, "only where buffers grow, and at the end, the GPU waits"


def test_no_graph_is_captured_again_when_texts_join(fake_cuda: type[FakeGraph]) -> None:
    """Texts join and leave while steps start ahead; numbers of rows change, and nothing moves."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    heads, sizes = (
        random_heads(model, **FORMS["eagle"]),
        [(3, 12), (20, 30), (9, 5), (30, 21), (5, 24), (12, 1), (7, 9)],
    )

    def asked() -> list[list[Any]]:
        return [requests_of(model, at, KINDS[at % len(KINDS)], *size) for at, size in enumerate(sizes)]

    expected = [alone(model, heads, requests) for requests in asked()]
    assert not fake_cuda.made
    batch = batch_of(model, heads)
    for _ in range(4):  # caches grow at first, and some numbers of rows have one step only
        assert come_and_go(batch, asked(), ROOM) == expected
    before, replays = len(fake_cuda.made), sum(one.replays for one in fake_cuda.made)
    assert come_and_go(batch, asked(), ROOM) == expected
    assert len(fake_cuda.made) == before > 4
    assert sum(one.replays for one in fake_cuda.made) > replays + 20
    assert "sent sent read" in " ".join(FakeEvent.log), "steps started ahead"
    batch.clear()
    [prompts_of] = [one.prompts for _, one in Regions.of(model) if len(one.sizes) > 1]
    assert prompts_of is not None
    assert any(prompts_of.graphed.graphs.values()), "prompts that join alone are read by graphs, too"


def test_a_step_waits_for_the_token_that_the_host_decides(
    fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts before the host knows, and changes nothing but caches beyond the text; the host then starts another."""
    monkeypatch.setattr(sampling, "CANDIDATES", 4)
    waited, stock, compact = list[bool](), Sampler.decide, State.compact

    def decided(self: Sampler, draft: Any, *given: Any) -> Any:
        held = [tensor.clone() for tensor in self.buffers if tensor is not self.noise]
        waited.append(bool(self.undecided))
        found = stock(self, draft, *given)
        if waited[-1]:
            assert found.length.eq(0).all()
            now = [tensor for tensor in self.buffers if tensor is not self.noise]
            assert all(map(torch.equal, held, now))
        return found

    def compacted(self: State, *given: Any) -> None:
        held = [tensor.clone() for tensor in (self.root, self.hidden, self.reader.cache.filled)]
        compact(self, *given)
        if waited[-1]:
            assert all(map(torch.equal, held, (self.root, self.hidden, self.reader.cache.filled)))

    model, batch = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256), [random_ids(5), random_ids(8)]
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "top_p": 0.6, "top_k": 0, "seeds": [3, 4]}
    heads, tree = random_heads(model, **FORMS["eagle"]), "dynamic:6"
    expected = texts(model, heads, batch, tree, **options, compile=True, cuda_graphs="off")
    monkeypatch.setattr(GraphedStep, "__call__", lambda self, size: self.step(size))  # nothing is replayed
    monkeypatch.setattr(Sampler, "decide", decided)
    monkeypatch.setattr(State, "compact", compacted)
    Regions.of(model).clear()
    assert texts(model, heads, batch, tree, **options, **OWN) == expected
    assert 0 < sum(waited) < len(waited) / 8, "where the host decides often, steps do not start ahead"


@pytest.mark.usefixtures("host_decides")
def test_all_texts_wait_for_the_token_of_one(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts end unforeseen, the others move in memory, and the step that runs may need the host for any of them."""
    moved, finish = list[int](), Sampler.finish

    def finished(self: Sampler, root: Tensor, rows: Any) -> Tensor:
        moved.extend(old for new, old in enumerate(rows) if new != old and root[new] == sampling.UNDECIDED)
        return finish(self, root, rows)

    monkeypatch.setattr(Sampler, "finish", finished)
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    batch = left_padded([random_ids(length, seed=length) for length in (3, 9, 6, 4, 5, 7, 8, 2)])
    call = partial(ids_of, model, random_heads(model), **batch, tree=Tree.chain(1))
    for seed in range(0, 72, 8):
        options: dict[str, Any] = {"do_sample": True, "top_p": 0.6, "top_k": 0, "max_new_tokens": 30}
        options |= {"seeds": [seed + row for row in range(8)], "eos_token_id": [1, 2, 3, 4, 5], "pad_token_id": 0}
        expected = call(**options, compile=True, cuda_graphs="off")
        assert torch.equal(call(**options, **OWN), expected)
    assert moved, "no text that waited had moved: no power"
    assert "sent sent read" in " ".join(FakeEvent.log)


@pytest.mark.usefixtures("host_decides")
@pytest.mark.parametrize("lasting", range(4, 12))
def test_a_step_that_does_not_wait_starts_after_the_host_has_decided(lasting: int, fake_cuda: type[FakeGraph]) -> None:
    """After the end of one of two texts, the other's steps are those that were compiled for a third, which sort all."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    cut: dict[str, Any] = {"do_sample": True, "top_k": 0, "top_p": 0.6}
    sizes = [({"do_sample": True, "top_k": 30}, 8), (cut, 40), (cut, lasting)]

    def asked(at: int) -> list[Any]:
        return requests_of(model, at, sizes[at][0], 5, sizes[at][1])

    expected = [alone(model, None, asked(at)) for at in range(3)]
    batch = batch_of(model, None, 2)
    assert written(batch, batch.join(asked(0))) == expected[:1]
    first = batch.join(asked(1))
    FakeEvent.log.clear()
    assert written(batch, [*first, *batch.join(asked(2))]) == expected[1:]
    assert "sent sent read" in " ".join(FakeEvent.log), "no step started ahead: no power"
    batch.clear()


@pytest.mark.usefixtures("host_decides")
@pytest.mark.parametrize("seed", [0, *weekly(1, 2)])
def test_texts_join_and_leave_while_the_host_decides(
    seed: int, fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of all kinds of sampling, whose ends the host does not foresee, in regions that others have used."""
    waited, read = list[bool](), CompiledStepper._read_next
    monkeypatch.setattr(
        CompiledStepper, "_read_next", lambda *given: (found := read(*given), waited.append(not found))[0]
    )
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    draws: dict[str, Any] = {"do_sample": True, "top_k": 0}
    kinds = [
        {"do_sample": False},
        draws | {"top_p": 0.6},
        draws | {"top_p": 0.6, "repetition_penalty": 1.3},
        draws | {"top_k": 30},
        draws | {"top_k": 5},
        draws | {"min_p": 0.2},
    ]
    rng = random.Random(seed)
    texts = [(random_ids(rng.randint(2, 20), seed=at), rng.randint(2, 30), rng.choice(kinds)) for at in range(12)]

    def asked() -> list[list[Any]]:
        ends: dict[str, Any] = {"eos_token_id": [1, 2, 3, 4], "pad_token_id": 0}
        return [
            prepare(model, [prompt], [at], max_new_tokens=new, **ends, **options)
            for at, (prompt, new, options) in enumerate(texts)
        ]

    heads = random_heads(model, **FORMS["eagle"])
    expected = [alone(model, heads, one) for one in asked()]
    batch = batch_of(model, heads)
    for order in range(2):
        assert come_and_go(batch, asked(), ROOM, seed=order) == expected
    batch.clear()
    assert any(waited), "no step waited: no power"
    assert not any(a and b for a, b in itertools.pairwise(waited))


def test_many_texts_join_graphed_steps(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several turns join alone, by the prompts' graphs, and while a step runs ahead."""
    monkeypatch.setattr(bulk, "FREE_PADDING", 0)
    monkeypatch.setattr(bulk, "PADDING", 0)
    read, stock = list[Any](), Region.read
    monkeypatch.setattr(Region, "read", lambda self, ids, lengths: read.append(lengths) or stock(self, ids, lengths))
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    texts: list[list[list[int]]] = [[] for _ in range(6)]

    def job(place: int, prompt: list[int]) -> Job:
        def ended(new: list[int], reason: str) -> None:
            texts[place].append([*prompt, *new])
            if len(texts[place]) < 4:
                jobs.append(job(place, texts[place][-1]))

        return Job(prompt, 0, ended)

    jobs, *late = [deque([job(place, random_ids(3 + 4 * place, seed=place))]) for place in range(6)]
    writer = BulkWriter(TextGenerator(model, Settings(max_new_tokens=7, ignore_eos=True, compile=True)), 4)
    writer.write(jobs, lambda lengths: jobs.extend(late.pop() if late else ()))  # so that they end one by one
    for turns in texts:
        assert len(turns) == 4
        assert turns[-1] == [*turns[0][:-7], *plain(model, turns[0][:-7], max_new_tokens=28, eos_token_id=None)]
    assert "sent sent read" in " ".join(FakeEvent.log), "steps started ahead"
    assert len(read) > 12, "prompts that join alone are read by graphs"


def test_one_graph_for_each_window(fake_cuda: type[FakeGraph]) -> None:
    count, ran = torch.zeros(1), list[str]()

    def step(window: int) -> Tensor:
        ran.append("step")
        return count.add_(1) * 1

    graphed = GraphedStep(step, CPU)
    for window, runs, captured in ((1, 1, 0), (1, 2, 1), (1, 2, 1), (2, 3, 1), (2, 4, 2), (1, 4, 2), (2, 4, 2)):
        before = int(count)
        assert int(graphed(window)) == before + 1, "each call is one step, also one that captures"
        assert (len(ran), len(fake_cuda.made)) == (runs, captured)
    graphed.clear()
    graphed(1)
    assert len(ran) == 5, "after a move of the state, nothing is replayed"


def test_a_first_step_that_fails_is_not_a_warm_up(fake_cuda: type[FakeGraph]) -> None:
    calls = list[int]()

    def step(window: int) -> Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("full")
        return torch.zeros(1)

    graphed = GraphedStep(step, CPU)
    with pytest.raises(torch.OutOfMemoryError):
        graphed(1)
    graphed(1)
    assert not fake_cuda.made, "the second step is the first that runs"
    graphed(1)
    assert len(fake_cuda.made) == 1


def test_a_step_that_cannot_be_captured_runs_without_a_graph(fake_cuda: type[FakeGraph]) -> None:
    count = torch.zeros(1)

    def step(window: int) -> Tensor:
        count.item()  # waits for the device, which a capture refuses
        return count.add_(1) * 1

    graphed = GraphedStep(step, CPU)
    assert int(graphed(1)) == 1
    with pytest.warns(UserWarning, match="without CUDA graphs, because capturing one failed: .* cannot be captured"):
        assert int(graphed(1)) == 2
    assert [int(graphed(window)) for window in (1, 2, 2, 2)] == [3, 4, 5, 6]
    assert len(fake_cuda.made) == 1, "no further attempt"
    assert torch.cuda.current_stream() == "the default stream", "not the one of the capture"


def test_a_failed_capture_leaves_other_graphs(fake_cuda: type[FakeGraph]) -> None:
    """Memory may be missing once. After a move of the state, graphs are captured again."""
    count, fails = torch.zeros(1), [False]

    def step(window: int) -> Tensor:
        if fails[0]:
            fails[0] = False
            raise torch.OutOfMemoryError("full")
        return count.add_(1) * 1

    graphed = GraphedStep(step, CPU)
    assert [int(graphed(window)) for window in (1, 1, 2)] == [1, 2, 3]
    fails[0] = True
    with pytest.warns(UserWarning, match="capturing one failed: full"):
        assert int(graphed(2)) == 4
    assert [int(graphed(window)) for window in (1, 2, 1)] == [5, 6, 7]
    assert fake_cuda.made[0].replays == 3
    assert len(fake_cuda.made) == 2
    graphed.clear()
    assert [int(graphed(1)) for _ in range(2)] == [8, 9]
    assert len(fake_cuda.made) == 3


def test_weights_that_move_are_captured_again(fake_cuda: type[FakeGraph]) -> None:
    """`model.to` to another device and back leaves the parameters' identity, and moves their memory."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    heads, tree, prompt = random_heads(model), random_tree(6, max_depth=3), random_ids(5)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}

    def captures() -> int:
        before = len(fake_cuda.made)
        assert texts(model, heads, [prompt], tree, **options, **OWN) == [
            plain(model, prompt, eos_token_id=None, **options)
        ]
        return len(fake_cuda.made) - before

    captures()
    captures()  # now also windows in which the first text had one step
    captures()  # and the prompt
    assert captures() == 0, "nothing has moved"
    for states in (model.parameters(), heads.parameters(), model.buffers()):
        for state in states:
            state.data = state.data.clone()
        assert captures() + captures() > 0
        assert captures() == 0
    assert len(Regions.of(model)) == 1, "the compiled code stays"


def test_no_graph_is_captured_while_time_counts(fake_cuda: type[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's warm-up captures all windows, though its shortest and its longest prompt have short texts."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    batches = [[random_ids(length, seed=length)] for length in (3, 30, 5)]
    written = [plain(model, batch[0], max_new_tokens=28, eos_token_id=None) for batch in batches]
    ends = [next(token for token in text if token not in written[2]) for text in written[:2]]
    model.generation_config.eos_token_id = ends
    assert all(text.index(end) < 8 for text, end in zip(written, ends, strict=False))
    captured, stock = list[int](), TextGenerator.__call__

    def counted(self: Any, prompts: Any, on_step: Any = None, seeds: Any = None) -> Any:
        before, found = len(fake_cuda.made), stock(self, prompts, on_step, seeds)
        captured.append(len(fake_cuda.made) - before)
        return found

    monkeypatch.setattr(TextGenerator, "__call__", counted)
    monkeypatch.setattr(session, "AHEAD", 64)
    method = plain_method(model, Settings(max_new_tokens=28, **OWN))
    run_rounds([Contender("plain", method)], batches, rounds=1)
    assert sum(captured[:3]) > 1
    assert captured[3:] == [0] * 3, "the warm-up has captured everything"


def test_torch_graphs_stay_in_the_main_thread() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert [graphs_for(asked, cuda) for asked in ("torch", "own", "off")] == ["torch", "own", "off"]
    assert at_once(lambda _: [graphs_for(asked, cuda) for asked in ("torch", "own", "off")]) == [["off", "own", "off"]]
    assert graphs_for("torch", cpu) == "off"


@pytest.mark.usefixtures("as_written")
def test_threads_write_equal_texts_in_turns_and_at_once() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    heads, tree = random_heads(model), random_tree(6, max_depth=3)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    prompts = [random_ids(6), random_ids(9, seed=1)]
    expected = [plain(model, prompt, eos_token_id=None, **options) for prompt in prompts]

    def write(index: int) -> list[int]:
        return texts(model, heads, [prompts[index]], tree, compile=True, **options)[0]

    assert [write(0), *at_once(lambda _: write(1))] == expected
    assert len(Regions.of(model)) == 1, "threads take turns with one region"
    assert at_once(write, 2) == expected


def test_without_a_gpu_there_are_no_graphs() -> None:
    assert {graphs_for(asked, torch.device("cpu")) for asked in CUDA_GRAPHS} == {"off"}


def test_own_graphs_are_the_default() -> None:
    """On an H200, they took less time in six of eight pairs (docs/results.md)."""
    assert DecodingOptions(compile=True).compiled == "own"
