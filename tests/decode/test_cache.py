"""decode/cache.py: after any number of steps the cache equals a fresh prefill of the same text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, finalize

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Llama4TextConfig, LlamaConfig

from decode.cache import BLOCK, MAX_GROWTH, MIN_GROWTH, SMALL_BYTES, TreeCache, most_slots, rounded, zeros
from decode.draft import Draft
from decode.reader import Reader
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.errors import RequestError
from tests.helpers import path_logits, random_ids, random_tree, tiny_model, weekly

CPU = torch.device("cpu")


@pytest.fixture
def buffer_per_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small cache have the buffers of a large one."""
    monkeypatch.setattr("decode.cache.SMALL_BYTES", 0)


def cache_of(layers: int, batch: int, capacity: int) -> TreeCache:
    return TreeCache(LlamaConfig(num_hidden_layers=layers), batch, capacity, CPU)


def append(cache: TreeCache, values: list[list[float]]) -> None:
    """Append one number per token as key (its negative as value) to one head of size one in every layer."""
    states = torch.tensor(values)[:, None, :, None]
    cache.open(states.shape[2])
    cache.append(states.shape[2])
    for index in range(len(cache.layers)):
        cache.update(states, -states, index)


def keys_of(cache: TreeCache, row: int, slots: int) -> list[float]:
    return cache.tree_layers[-1].read()[0][row, 0, :slots, 0].tolist()


def test_worked_example() -> None:
    """The picture in the module's docstring: text t0 t1 t2 is 10 11 12, nodes n0..n3 are 0..3; n0 and n2 are kept."""
    cache = cache_of(2, 1, capacity=8)
    append(cache, [[10, 11, 12]])
    cache.keep([3])
    append(cache, [[0, 1, 2, 3]])
    assert (cache.lengths, cache.width) == ([3], 7)
    assert keys_of(cache, 0, 7) == [10, 11, 12, 0, 1, 2, 3]
    cache.commit(torch.tensor([[0, 2, -1]]), torch.tensor([2]))
    assert cache.filled.tolist() == [5]
    assert cache.lengths == [3], "the host does not know yet"
    cache.count([2])
    assert cache.lengths == [5]
    for layer in cache.tree_layers:
        keys, values = layer.read()
        assert keys[0, 0, :5, 0].tolist() == [10, 11, 12, 0, 2]
        assert values[0, 0, :5, 0].tolist() == [-10, -11, -12, -0.0, -2]


def test_misuse_raises() -> None:
    cache = cache_of(1, 1, 4)
    with pytest.raises(RuntimeError, match="without a forward"):
        cache.keep([1])
    with pytest.raises(RuntimeError, match="crop"):
        cache.tree_layers[0].crop(-1)


class Shape(NamedTuple):
    """Heads and head sizes of a layer's keys and values."""

    heads: int
    keys: int
    values: int


SHAPES = (Shape(2, 3, 3), Shape(1, 4, 2), None, Shape(2, 3, 3))
"""Those of the layers of a made-up model; `None` is a layer that reads the cache of another."""
Token = list[tuple[Tensor, Tensor]]  # a token's key and value [H, D] in each layer that has some


class Checked:
    """A `TreeCache` beside a slow, obvious one, which holds a list of tokens for each row."""

    def __init__(self, rng: random.Random, rows: int, fixed: bool = False) -> None:
        self.rng, self.texts = rng, [list[Token]() for _ in range(rows)]
        config = LlamaConfig(num_hidden_layers=len(SHAPES))
        self.cache = TreeCache(config, rows, rng.choice([1, 6, 40]), CPU, fixed)
        self.forward(rng.randint(1, 9))
        self.cache.keep([len(nodes) for nodes in self.nodes])
        self.grow([range(len(nodes)) for nodes in self.nodes])

    def forward(self, count: int) -> None:
        """Write `count` nodes to each row, and check what attention then reads."""
        cache, compiled = self.cache, self.cache.is_compiled
        before, room = [buffer.data_ptr() for buffer in cache.buffers], cache.capacity
        cache.open(count)
        assert cache.capacity > room or before == [buffer.data_ptr() for buffer in cache.buffers]
        positions = cache.append(count)
        self.nodes: list[list[Token]] = [[[] for _ in range(count)] for _ in self.texts]
        for index, shape in enumerate(SHAPES):
            if shape is None:
                continue
            keys, values = (torch.randn(len(cache.filled), shape.heads, count, size) for size in shape[1:])
            read = cache.update(keys, values, index)
            for row, nodes in enumerate(self.nodes):
                for node, token in enumerate(nodes):
                    token.append((keys[row, :, node], values[row, :, node]))
            for row, nodes in enumerate(self.nodes):
                self.check_row(row, len(nodes[0]) - 1, read, self.texts[row] + nodes)
        for row, text in enumerate(self.texts):
            assert positions[row].tolist() == list(range(len(text), len(text) + count))
        longest = max(map(len, self.texts))
        assert cache.width == (rounded(longest + count) if compiled else longest + count)
        if compiled:
            assert cache.width % BLOCK == 0
            assert all(buffer.shape[3] > cache.width for buffer in cache.buffers)

    def check_row(self, row: int, layer: int, read: tuple[Tensor, Tensor], text: list[Token]) -> None:
        for found, part in zip(read, (0, 1), strict=True):
            assert torch.equal(found[row, :, : len(text)], torch.stack([token[layer][part] for token in text], dim=1))

    def grow(self, paths: Sequence[Sequence[int]]) -> None:
        for text, nodes, path in zip(self.texts, self.nodes, paths, strict=True):
            text += [nodes[node] for node in path]

    def commit(self) -> None:
        """Keep a random path in each row, in one of the ways to say which."""
        cache, count = self.cache, len(self.nodes[0])
        lengths = [self.rng.randint(1, count) for _ in self.texts]
        way = self.rng.choice(["tensor", "chain", "host"])
        paths = [self.path(length, count, way == "chain") for length in lengths]
        if way == "host" and not cache.is_compiled:
            cache.keep(lengths, paths)
        else:
            most = self.rng.choice([max(lengths), count, count + 3])  # paths may have more columns than nodes
            empty = len(cache.filled) - len(self.texts)
            padded = torch.tensor([path + [-1] * (most - len(path)) for path in paths + [[]] * empty])
            cache.commit(None if way == "chain" else padded, torch.tensor(lengths + [0] * empty))
            cache.count(lengths)
        self.grow(paths)

    def path(self, length: int, count: int, is_chain: bool) -> list[int]:
        if is_chain:
            return list(range(length))
        return [0, *sorted(self.rng.sample(range(1, count), length - 1))]

    def select(self) -> None:
        rows = self.rng.sample(range(len(self.texts)), self.rng.randint(1, len(self.texts)))
        self.cache.select(rows)
        self.texts = [self.texts[row] for row in rows]

    def join(self, most: int = 2) -> None:
        other = Checked(self.rng, self.rng.randint(1, most))
        self.cache.join(other.cache)
        self.texts += other.texts

    def cut(self) -> None:
        self.texts = [text[: self.rng.randint(1, len(text))] for text in self.texts]
        self.cache.cut([len(text) for text in self.texts])

    def check(self) -> None:
        lengths = [len(text) for text in self.texts]
        assert self.cache.lengths == lengths
        assert self.cache.filled.tolist() == lengths + [0] * (len(self.cache.filled) - len(lengths))
        self.cache.open(0)
        layers = [layer for layer, shape in zip(self.cache.tree_layers, SHAPES, strict=True) if shape is not None]
        for index, layer in enumerate(layers):
            for row, text in enumerate(self.texts):
                self.check_row(row, index, layer.read(), text)


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_do_what_lists_of_tokens_do(seed: int) -> None:
    """Steps of all sizes, rows that leave, join or lose their ends, and buffers that grow several times."""
    rng = random.Random(seed)
    both = Checked(rng, rng.randint(1, 3))
    for _ in range(25):
        both.forward(rng.choice([1, 2, 7, 7, 150]))
        both.commit()
        if rng.random() < 0.4:
            rng.choice([both.select, both.join, both.cut])()
        both.check()


@pytest.mark.parametrize("seed", range(3))
def test_random_compiled_steps_do_what_lists_of_tokens_do(seed: int) -> None:
    """Windows are whole blocks. Rows whose texts have ended stay as empty rows, which others take."""
    rng = random.Random(seed)
    both, seen = Checked(rng, 4, fixed=True), set[tuple[int, int]]()
    both.cache.for_steps(compiled=True)
    for _ in range(40):
        both.forward(rng.choice([1, 7, 7, 90]))
        both.commit()
        if rng.random() < 0.3:
            both.select()
        elif len(both.texts) < 4 and rng.random() < 0.5:
            both.join(4 - len(both.texts))
        both.cache.show(rng.randint(len(both.texts), 4))
        both.check()
        seen.add((len(both.texts), len(both.cache.filled)))
        assert all(buffer.shape[1] == 4 for buffer in both.cache.buffers), "no other number of rows in memory"
    assert len(seen) > 5


def test_the_padding_of_a_path_reserves_no_slots() -> None:
    """The path has more columns than the cache has slots."""
    cache = TreeCache(LlamaConfig(num_hidden_layers=1), 1, 4, CPU)
    append(cache, [[1, 2, 3, 4]])
    cache.keep([2], [[0, 2]])
    append(cache, [[5, 6]])
    cache.commit(torch.tensor([[0, 1, -1, -1, -1, -1]]), torch.tensor([2]))
    assert cache.buffers[0][0, 0, 0, :4, 0].tolist() == [1, 3, 5, 6]


def test_a_fixed_cache_drops_its_texts() -> None:
    cache = TreeCache(LlamaConfig(num_hidden_layers=1), 2, 1, CPU, fixed=True)
    append(cache, [[1.0] * 6] * 2)
    cache.keep([3, 6])
    cache.show(1)
    cache.empty()
    assert (cache.lengths, cache.all_filled.tolist()) == ([], [0, 0])
    other = cache_of(1, 1, 2)
    append(other, [[5, 7]])
    other.keep([2])
    cache.join(other)
    assert (cache.lengths, cache.all_filled.tolist()) == ([2], [2, 0])
    assert cache.buffers[0][0, 0, 0, :3, 0].tolist() == [5, 7, 0], "nothing of the text before"


def test_a_cache_starts_again_without_what_it_held() -> None:
    """A masked NaN of an earlier text would reach the output, as 0 x NaN."""
    cache = cache_of(2, 2, capacity=8)
    append(cache, [[float("nan")] * 3] * 2)
    cache.keep([3, 2])
    addresses = [buffer.data_ptr() for buffer in cache.buffers]
    cache.restart(cache.capacity)
    assert (cache.lengths, cache.filled.tolist()) == ([0, 0], [0, 0])
    assert all(not buffer.any() for buffer in cache.buffers)
    assert addresses == [buffer.data_ptr() for buffer in cache.buffers]
    append(cache, [[5]] * 2)
    assert keys_of(cache, 0, 1) == [5]


def require_equal_to_a_fresh_prefill(model: Any, cache: TreeCache, texts: list[list[int]]) -> None:
    """Check that text written through trees has the keys and values of one plain forward."""
    assert cache.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = DynamicCache()  # without the config: no window drops a key
        model(input_ids=torch.tensor([text]), past_key_values=fresh)
        found = [layer.read() for layer in cache.tree_layers if layer.is_initialized]
        for ours, theirs in zip(found, fresh.layers, strict=True):
            # float64 throughout, but norms and rotary angles are float32 inside transformers, so 1e-7 relative at
            # best; a key of the wrong token or position differs by more than 0.1.
            expected = theirs.keys[0], theirs.values[0]
            torch.testing.assert_close(
                tuple(each[row, :, : len(text)] for each in ours), expected, rtol=1e-5, atol=1e-5
            )


ROWS = {"one row": [9], "even rows": [9, 9], "ragged rows": [9, 4, 7]}


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        *((family, "ragged rows") for family in ("gemma3_text", "gemma4_text", "gpt2")),
        ("llama", "even rows"),
        ("deepseek_v3", "one row"),
        *weekly(*((family, "ragged rows") for family in ("llama", "qwen2", "deepseek_v3"))),
    ],
)
@pytest.mark.usefixtures("buffer_per_layer")
@torch.no_grad()
def test_after_random_steps_the_cache_equals_a_fresh_prefill(family: str, rows: str) -> None:
    """Six steps of random trees and paths cross the first allocation's end; a row leaves, and two join.

    In Gemma 4 some layers read the keys and values of others, and layers differ in shape."""
    lengths = ROWS[rows]
    rng = random.Random(len(lengths))
    model = tiny_model(family, dtype=torch.float64)
    texts = [random_ids(length, seed=row) for row, length in enumerate(lengths)]
    reader = read(model, texts)
    cache = reader.cache
    for step in range(6):
        tree = random_tree(10, seed=step)
        ids = [random_ids(tree.num_nodes, seed=100 * step + row) for row in range(len(texts))]
        logits = reader(Draft(torch.tensor(ids), Topology.of(tree))).logits
        if step == 5:
            for row, text in enumerate(texts):
                # Tolerance as above.
                torch.testing.assert_close(logits[row], path_logits(model, text, ids[row], tree), rtol=1e-4, atol=1e-4)
        ends = [rng.randrange(tree.num_nodes) for _ in texts]
        paths, counts = tree.paths[ends], tree.depth[ends] + 1
        cache.commit(paths, counts)
        cache.count(counts.tolist())
        for row, text in enumerate(texts):
            text += [ids[row][node] for node in paths[row].tolist() if node >= 0]
        if step == 3 and len(texts) == 3:
            cache.select([2, 0])
            joined = [random_ids(5, seed=7), random_ids(40, seed=8)]
            cache.join(read(model, joined).cache)
            texts = [texts[2], texts[0], *joined]
    assert cache.capacity > 16, "the first allocation was never outgrown"
    cache.open(0)
    require_equal_to_a_fresh_prefill(model, cache, texts)


def read(model: Any, texts: list[list[int]]) -> Reader:
    """A reader that has read `texts` into a small cache."""
    reader = Reader(Backbone(model), TreeCache(model.config, len(texts), 16, CPU))
    longest = max(map(len, texts))
    reader.prefill(torch.tensor([text + [0] * (longest - len(text)) for text in texts]), list(map(len, texts)))
    return reader


@pytest.mark.usefixtures("buffer_per_layer")
def test_buffers_hold_only_keys_and_values_of_every_layer() -> None:
    """When keys and values differ in size (MLA), each buffer needs room for one of them per layer, not for both."""
    reader = read(tiny_model("deepseek_v3"), [[1, 2, 3]])
    reader.cache.open(reader.cache.capacity - 3)
    needed = sum(states.numel() for layer in reader.cache.tree_layers for states in layer.read())
    assert sum(buffer.numel() for buffer in reader.cache.buffers) == needed


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made in its context and still exist; `peak` is the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and (storage := out.untyped_storage()) not in self.known:
            self.known.add(storage)
            self._add(storage.nbytes())
            finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


def filled_cache(layers: int, batch: int, capacity: int) -> TreeCache:
    """A cache whose rows hold random numbers in all slots."""
    cache = cache_of(layers, batch, capacity)
    cache.open(capacity)
    cache.append(capacity)
    for index in range(layers):
        cache.update(torch.randn(batch, 2, capacity, 4), torch.randn(batch, 2, capacity, 4), index)
    cache.keep([capacity] * batch)
    return cache


def contents(cache: TreeCache, slots: int) -> list[Tensor]:
    return [states[:, :, :slots].clone() for layer in cache.tree_layers for states in layer.read()]


def test_a_row_that_joins_finds_nothing_of_the_text_before() -> None:
    """A text of a broken model leaves NaN behind, and a masked NaN would still reach the next text, as 0 x NaN."""
    cache = filled_cache(layers=2, batch=3, capacity=8)
    for buffer in cache.buffers:
        buffer[:, 2] = torch.nan
    cache.select([0, 1])
    cache.join(filled_cache(layers=2, batch=1, capacity=4))
    assert not any(buffer.isnan().any() for buffer in cache.buffers)
    assert not any(buffer[:, 2, :, 4:].any() for buffer in cache.buffers)


@pytest.mark.usefixtures("buffer_per_layer")
def test_rows_that_end_need_no_second_cache() -> None:
    """16 rows end one after another, and one joins in the memory of one that has ended: no buffer is copied."""
    with LiveBytes() as memory:
        cache = filled_cache(layers=20, batch=16, capacity=64)
        expected, full = contents(cache, 64), cache.num_bytes
        copies = memory.now - full
        memory.peak = memory.now
        rows = list(range(16))
        for place in (3, 0, 13, 5, 5, 8, 0, 1, 7, 2, 2, 0, 3, 1, 0):
            del rows[place]
            cache.select([row for row in range(len(rows) + 1) if row != place])
        addresses, new = [buffer.data_ptr() for buffer in cache.buffers], filled_cache(20, batch=1, capacity=64)
        cache.join(new)
        assert addresses == [buffer.data_ptr() for buffer in cache.buffers]
        assert memory.peak - copies <= 1.1 * full + new.num_bytes
    for found, before in zip(contents(cache, 64), expected, strict=True):
        assert torch.equal(found[:1], before[rows])


@pytest.mark.usefixtures("buffer_per_layer")
def test_a_growing_cache_has_one_layer_in_memory_twice() -> None:
    with LiveBytes() as memory:
        cache = filled_cache(layers=20, batch=2, capacity=MIN_GROWTH)
        expected, full = contents(cache, MIN_GROWTH), cache.num_bytes
        copies = memory.now - full
        memory.peak = memory.now
        cache.open(1)
        grown = cache.num_bytes
        assert grown > 1.9 * full
        assert memory.peak - copies <= 1.001 * grown + 0.1 * full  # each buffer is aligned to 64 bytes
        assert memory.now - copies - grown < 0.01 * grown
    for found, before in zip(contents(cache, MIN_GROWTH), expected, strict=True):
        assert torch.equal(found, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 2, 5, 7, 4), (1, 0, 2, 8, 4), (1,)], ids=str)
def test_memory_of_a_cache_is_zero_and_aligned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """As PyTorch's own: its kernels read 64 bytes at once."""
    made = zeros(shape, torch.ones(2, dtype=dtype))
    assert (made.shape, made.dtype) == (shape, dtype)
    assert made.is_contiguous()
    assert not made.any()
    assert made.data_ptr() % 64 == 0
    made.fill_(1)  # it can be written
    assert made.all()


def test_memory_that_is_reserved_holds_texts_that_join_without_moving_others() -> None:
    cache = filled_cache(layers=2, batch=1, capacity=8)
    cache.reserve(4)
    expected, addresses = contents(cache, 8), [buffer.data_ptr() for buffer in cache.buffers]
    for _ in range(3):
        cache.join(filled_cache(layers=2, batch=1, capacity=8))
    cache.reserve(3)
    assert addresses == [buffer.data_ptr() for buffer in cache.buffers]
    assert all(torch.equal(found[:1], before) for found, before in zip(contents(cache, 8), expected, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
def test_texts_and_drafts_stay_below_the_slot_from_which_llama_4_scales_queries(compiled: bool) -> None:
    """Windows of compiled steps may end beyond: nothing is written there."""
    config = Llama4TextConfig(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0], floor_scale=1024)
    cache = TreeCache(config, 1, 16, CPU, fixed=compiled)
    cache.for_steps(compiled)
    cache.lengths = [1000]
    cache.open(23)
    assert cache.width == (1024 if compiled else 1023)
    with pytest.raises(RequestError, match="the model has 1023 slots, and text and draft need 1024"):
        cache.open(24)


def test_a_small_cache_is_one_buffer() -> None:
    """One copy then moves a node in all layers; a larger cache is divided."""
    assert len(filled_cache(layers=20, batch=1, capacity=10).buffers) == 1
    large = SMALL_BYTES // (20 * 2 * 2 * 4 * 4) + 1
    assert [len(buffer) for buffer in filled_cache(layers=20, batch=1, capacity=large).buffers] == [4] * 10


@pytest.mark.parametrize("slots", [100, 1000, 5000])
def test_a_large_cache_grows_a_little(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many texts must not need twice the memory of their tokens."""
    monkeypatch.setattr("decode.cache.LARGE_BYTES", 0)
    cache = filled_cache(layers=1, batch=2, capacity=slots)
    append(cache, [[1.0], [1.0]])
    assert slots < cache.capacity <= most_slots(slots + 1)
    assert cache.capacity <= max(slots + 1 + MIN_GROWTH, 1.125 * slots)


def test_memory_grows_with_the_text_in_few_steps_and_not_too_far() -> None:
    """It doubles at first. Doubling 32k slots for one token would need the memory of three such texts."""
    cache = cache_of(1, 1, capacity=10)
    append(cache, [[1.0] * 10])
    cache.keep([10])
    append(cache, [[1.0]])
    assert cache.capacity == 11 + MIN_GROWTH
    cache = cache_of(1, 1, capacity=MAX_GROWTH * 2)
    append(cache, [[0.0] * MAX_GROWTH * 2])
    cache.keep([MAX_GROWTH * 2])
    append(cache, [[1.0]])
    assert cache.capacity == MAX_GROWTH * 3
