"""decode/cache.py: after any number of steps the cache equals a fresh prefill of the same text."""

from __future__ import annotations

import random
from typing import Any
from weakref import WeakSet, finalize

import pytest
import torch
from decode.verify import Verifier
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig

from decode.cache import MAX_GROWTH, MIN_GROWTH, SMALL_BYTES, TreeCache
from decode.draft import Draft
from decode.topology import Topology
from medusa import Tree
from medusa.backbone import Backbone
from tests.helpers import path_logits, random_ids, random_tree, tiny_model

MODELS = ["llama", "mistral", "qwen2", "gemma3_text", "gpt2", "deepseek_v3"]


def cache_of(model: Any, batch: int, capacity: int) -> TreeCache:
    return TreeCache(model.config, batch, capacity)


def append(cache: TreeCache, values: list[list[float]]) -> None:
    """Append one number per token as key (its negative as value) to one head of size one in every layer."""
    states = torch.tensor(values)[:, None, :, None]
    for index in range(len(cache.layers)):
        cache.update(states, -states, index)


def test_worked_example() -> None:
    """The picture in the module's docstring: text t0 t1 t2 is 10 11 12, nodes n0..n3 are 0..3; n0 and n2 are kept."""
    cache = cache_of(tiny_model("llama"), 1, capacity=8)
    append(cache, [[10, 11, 12]])
    cache.commit_prompt([3])
    append(cache, [[0, 1, 2, 3]])
    assert cache.lengths == [3]
    assert cache.layers[0].keys[0, 0, :, 0].tolist() == [10, 11, 12, 0, 1, 2, 3, 0]
    cache.commit(torch.tensor([[0, 2]]), [2])
    assert cache.lengths == [5]
    for layer in cache.layers:
        assert layer.keys[0, 0, :5, 0].tolist() == [10, 11, 12, 0, 2]
        assert layer.values[0, 0, :5, 0].tolist() == [-10, -11, -12, -0.0, -2]


def test_worked_example_of_ragged_rows() -> None:
    cache = cache_of(tiny_model("llama"), 2, capacity=9)
    append(cache, [[10, 11, 12], [20, 99, 99]])  # 99: padding on the right
    cache.commit_prompt([3, 1])
    append(cache, [[0, 1, 2, 3], [4, 5, 6, 7]])
    keys = cache.layers[1].keys[:, 0, :, 0]
    assert keys[0].tolist() == [10, 11, 12, 0, 1, 2, 3, 0, 0]
    assert keys[1, :5].tolist() == [20, 4, 5, 6, 7]
    cache.commit(torch.tensor([[0, 3, -1], [0, 1, 3]]), [2, 3])
    keys = cache.layers[1].keys[:, 0, :, 0]
    assert cache.lengths == [5, 4]
    assert keys[0, :5].tolist() == [10, 11, 12, 0, 3]
    assert keys[1, :4].tolist() == [20, 4, 5, 7]


def test_a_path_that_moves_over_itself() -> None:
    """Nodes 0 1 3 5 7 move to slots 0..4, so targets are also sources; written slots must not be read again."""
    for batch in (1, 2):
        cache = cache_of(tiny_model("llama"), batch, capacity=20)
        append(cache, [[9, 9]] * batch)
        cache.commit_prompt([2] * batch)
        append(cache, [list(range(8))] * batch)
        cache.commit(torch.tensor([[0, 1, 3, 5, 7]] * batch), [5] * batch)
        assert cache.layers[0].keys[batch - 1, 0, :7, 0].tolist() == [9, 9, 0, 1, 3, 5, 7]


def test_commit_needs_a_forward() -> None:
    with pytest.raises(RuntimeError):
        cache_of(tiny_model("llama"), 1, 4).commit(torch.tensor([[0]]), [1])


def test_memory_is_allocated_once_and_grows_by_copying_all_that_was_written() -> None:
    """The cache is full before it grows, and the last slot is copied, too."""
    cache = cache_of(tiny_model("llama"), 1, capacity=10)
    append(cache, [[1, 2]])
    cache.commit_prompt([2])
    buffer = cache.arenas[0].buffer.data_ptr()
    for _ in range(4):
        append(cache, [[1, 2]])
        cache.commit(torch.tensor([[0, 1]]), [2])
    assert cache.arenas[0].buffer.data_ptr() == buffer
    append(cache, [[3]])
    assert cache.capacity == 11 + MIN_GROWTH
    for layer in cache.layers:
        assert layer.keys[0, 0, :12, 0].tolist() == [1, 2] * 5 + [3, 0]
        assert layer.values[0, 0, :12, 0].tolist() == [-1, -2] * 5 + [-3, 0]


@pytest.mark.parametrize("small_bytes", [SMALL_BYTES, 0])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_arenas_hold_only_keys_and_values_of_every_layer(
    family: str, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When keys and values differ in size (MLA), each arena needs room for one of them per layer, not for both."""
    monkeypatch.setattr("decode.cache.SMALL_BYTES", small_bytes)
    model = tiny_model(family)
    cache = cache_of(model, 1, capacity=10)
    Backbone(model).forward(torch.tensor([[1, 2, 3]]), cache)
    needed = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert sum(arena.buffer.numel() for arena in cache.arenas) == needed


def require_equal_to_a_fresh_prefill(model: Any, cache: TreeCache, texts: list[list[int]]) -> None:
    """Check that text written through trees has the keys and values of one plain forward."""
    assert cache.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = DynamicCache()  # without the config: no window drops a key
        model(input_ids=torch.tensor([text]), past_key_values=fresh)
        for ours, theirs in zip(cache.layers, fresh.layers, strict=True):
            # float64 throughout, but norms and rotary angles are float32 inside transformers, so 1e-7 relative at
            # best; a key of the wrong token or position differs by more than 0.1.
            torch.testing.assert_close(ours.keys[row, :, : len(text)], theirs.keys[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(ours.values[row, :, : len(text)], theirs.values[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small_bytes", [SMALL_BYTES, 0], ids=["one arena", "an arena a layer"])
@pytest.mark.parametrize("lengths", [[9], [9, 9], [9, 4, 7]], ids=["one row", "even rows", "ragged rows"])
@pytest.mark.parametrize("family", MODELS)
@torch.no_grad()
def test_after_random_steps_the_cache_equals_a_fresh_prefill(
    family: str, lengths: list[int], small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight steps of random trees and paths cross the first allocation's end, and one row is dropped."""
    monkeypatch.setattr("decode.cache.SMALL_BYTES", small_bytes)
    rng = random.Random(len(lengths))
    model = tiny_model(family, dtype=torch.float64)
    backbone = Backbone(model)
    texts = [random_ids(length, seed=row) for row, length in enumerate(lengths)]
    cache = cache_of(model, len(texts), capacity=16)
    padded = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts])
    backbone.forward(padded, cache, position_ids=torch.arange(max(lengths)).expand(len(texts), -1))
    cache.commit_prompt(lengths)
    for step in range(8):
        tree = random_tree(10, seed=step)
        ids = [random_ids(tree.num_nodes, seed=100 * step + row) for row in range(len(texts))]
        logits = Verifier(backbone, cache)(Draft(torch.tensor(ids), Topology.of(tree))).logits
        if step in (0, 7):
            for row, text in enumerate(texts):
                # Tolerance as above.
                torch.testing.assert_close(logits[row], path_logits(model, text, ids[row], tree), rtol=1e-4, atol=1e-4)
        ends = [rng.randrange(tree.num_nodes) for _ in texts]
        paths = tree.paths[ends]
        counts = [int(tree.depth[end]) + 1 for end in ends]
        as_lists = [line[:count] for line, count in zip(paths.tolist(), counts, strict=True)]
        cache.commit(as_lists if step % 2 else paths, counts)
        for row, text in enumerate(texts):
            text += [ids[row][node] for node in paths[row].tolist() if node >= 0]
        if step == 4 and len(texts) == 3:
            cache.select([2, 0])
            texts = [texts[2], texts[0]]
    assert cache.capacity > 16, "the first allocation was never outgrown"
    require_equal_to_a_fresh_prefill(model, cache, texts)


@torch.no_grad()
def test_rows_do_not_see_each_other() -> None:
    """A row's results are bit for bit the same with other rows in the batch."""
    model = tiny_model("llama")
    backbone, tree = Backbone(model), random_tree(6, seed=0)

    def last_logits(neighbour: list[int]) -> torch.Tensor:
        cache = cache_of(model, 2, capacity=30)
        backbone.forward(torch.tensor([[1, 2, 3, 0], neighbour]), cache, position_ids=torch.arange(4).expand(2, -1))
        cache.commit_prompt([3, 4])
        ids = torch.tensor([random_ids(7), random_ids(7, seed=sum(neighbour))])
        return Verifier(backbone, cache)(Draft(ids, Topology.of(tree))).logits[0]

    assert torch.equal(last_logits([5, 6, 7, 8]), last_logits([50, 40, 30, 20]))


def test_unsupported_cache_operations_raise() -> None:
    cache = cache_of(tiny_model("llama"), 1, 4)
    with pytest.raises(RuntimeError, match="crop"):
        cache.layers[0].crop(-1)


@torch.no_grad()
def test_a_long_chain_is_read_as_plain_text() -> None:
    """As in chunked prefill, a chain whose nodes are all kept is plain text."""
    model = tiny_model("llama", dtype=torch.float64)
    backbone, tree, text = Backbone(model), Tree.chain(6), random_ids(3 + 7)
    cache = cache_of(model, 1, capacity=4)
    backbone.forward(torch.tensor([text[:3]]), cache, position_ids=torch.arange(3)[None])
    cache.commit_prompt([3])
    Verifier(backbone, cache)(Draft(torch.tensor([text[3:]]), Topology.of(tree)))
    cache.commit(tree.paths[-1:], [7])
    require_equal_to_a_fresh_prefill(model, cache, [text])


@pytest.mark.parametrize("small_bytes", [SMALL_BYTES, 0], ids=["one arena", "an arena a layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_host_moves_the_nodes_that_tensor_operations_move(
    dtype: torch.dtype, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths as lists, after the buffers were replaced, too: a row was dropped, and the cache has grown."""
    monkeypatch.setattr("decode.cache.SMALL_BYTES", small_bytes)
    rng, caches = random.Random(0), [cache_of(tiny_model("llama"), 3, capacity=12) for _ in range(2)]
    for cache in caches:
        for index in range(len(cache.layers)):
            cache.update(torch.zeros(3, 2, 2, 4, dtype=dtype), torch.zeros(3, 2, 2, 4, dtype=dtype), index)
        cache.commit_prompt([2, 1, 2])
    for step in range(8):
        rows = len(caches[0].lengths)
        states = torch.randn(rows, 2, 6, 4).to(dtype)
        lines = [[0, *sorted(rng.sample(range(1, 6), rng.randint(0, 4)))] for _ in range(rows)]
        lines[0] = [0, 1, 2] if step == 3 else lines[0]  # nothing moves in this row
        counts = list(map(len, lines))
        padded = torch.tensor([line + [-1] * (6 - len(line)) for line in lines])
        for cache, path in zip(caches, (lines, padded), strict=True):
            for index in range(len(cache.layers)):
                cache.update(states, -states, index)
            cache.commit(path, counts)
            if step in (2, 5):
                cache.select([*range(rows)][-2 if step == 2 else -1 :])
        assert caches[0].lengths == caches[1].lengths
        for ours, theirs in zip(caches[0].tree_layers, caches[1].tree_layers, strict=True):
            for row, length in enumerate(caches[0].lengths):
                assert torch.equal(ours.keys[row, :, :length], theirs.keys[row, :, :length])
                assert torch.equal(ours.values[row, :, :length], theirs.values[row, :, :length])
    assert caches[0].capacity > 12
    assert len(caches[0].lengths) == 1


def test_rows_that_end_give_back_what_the_host_has_moved() -> None:
    cache = cache_of(tiny_model("llama"), 2, capacity=12)
    append(cache, [[1, 2, 3], [4, 5, 6]])
    cache.commit([[0, 2], [0, 1]], [2, 2])
    old = WeakSet([cache.arenas[0].buffer.untyped_storage()])
    assert len(old) == 1
    cache.select([1])
    assert not old


def test_a_chain_is_committed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain's accepted nodes come first, so nothing moves, and the cache equals a cache after moves."""
    caches = [cache_of(tiny_model("llama"), 2, capacity=12) for _ in range(2)]
    for cache, in_place in zip(caches, (False, True), strict=True):
        append(cache, [[1, 2], [3, 99]])
        cache.commit_prompt([2, 1])
        append(cache, [[4, 5, 6], [7, 8, 9]])
        if in_place:
            monkeypatch.setattr(cache, "_move", None)
        cache.commit(None if in_place else torch.tensor([[0, 1, -1], [0, 1, 2]]), [2, 3])
    for row, length in enumerate([4, 4]):
        moved, lying = (cache.layers[0].keys[row, 0, :length, 0].tolist() for cache in caches)
        assert moved == lying
    assert caches[0].lengths == caches[1].lengths == [4, 4]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that were made in its context and still exist; `peak` is the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: WeakSet[torch.UntypedStorage] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and (storage := out.untyped_storage()) not in self.known:
            self.known.add(storage)
            self._add(storage.nbytes())
            finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, count: int) -> None:
        self.now += count
        self.peak = max(self.peak, self.now)


def test_live_bytes_counts_views_once_and_forgets_what_is_freed() -> None:
    with LiveBytes() as memory:
        first = torch.zeros(1000)
        view = first[1:]
        del first
        assert memory.now == 4000
        second = torch.zeros(500)
        del view
        assert (memory.now, memory.peak) == (2000, 6000)
        del second
        assert memory.now == 0


def filled_cache(layers: int, batch: int, capacity: int) -> TreeCache:
    """A cache whose rows hold random numbers in all slots."""
    cache = TreeCache(LlamaConfig(num_hidden_layers=layers), batch, capacity)
    for index in range(layers):
        cache.update(torch.randn(batch, 2, capacity, 4), torch.randn(batch, 2, capacity, 4), index)
    cache.commit_prompt([capacity] * batch)
    return cache


def contents(cache: TreeCache, slots: int) -> list[torch.Tensor]:
    return [states[:, :, :slots].clone() for layer in cache.tree_layers for states in (layer.keys, layer.values)]


def bytes_of(cache: TreeCache) -> int:
    return sum(arena.buffer.nbytes for arena in cache.arenas)


def test_rows_that_end_need_no_second_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 rows end one after another; the peak is at most 1.1 times the full cache, and memory is given back."""
    monkeypatch.setattr("decode.cache.SMALL_BYTES", 0)
    with LiveBytes() as memory:
        cache = filled_cache(layers=20, batch=16, capacity=64)
        expected, full = contents(cache, 64), bytes_of(cache)
        copies = memory.now - full
        memory.peak = memory.now
        rows = list(range(16))
        for place in (3, 0, 13, 5, 5, 8, 0, 1, 7, 2, 2, 0, 3, 1, 0):
            del rows[place]
            cache.select([row for row in range(len(rows) + 1) if row != place])
            assert memory.peak - copies <= 1.1 * full
        assert memory.now - copies < 1.1 * full / 16
    for found, before in zip(contents(cache, 64), expected, strict=True):
        assert torch.equal(found, before[rows])


def test_a_growing_cache_has_one_layer_in_memory_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.cache.SMALL_BYTES", 0)
    with LiveBytes() as memory:
        cache = filled_cache(layers=20, batch=2, capacity=MIN_GROWTH)
        expected, full = contents(cache, MIN_GROWTH), bytes_of(cache)
        copies = memory.now - full
        memory.peak = memory.now
        cache.reserve(MIN_GROWTH + 1)
        grown = bytes_of(cache)
        assert grown > 1.9 * full
        assert memory.peak - copies <= grown + 0.1 * full
        assert memory.now - copies == grown
    for found, before in zip(contents(cache, MIN_GROWTH), expected, strict=True):
        assert torch.equal(found, before)


def test_a_small_cache_is_one_arena_until_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy then moves a node in all layers; a larger cache is divided, also if it was small at first."""
    cache = filled_cache(layers=20, batch=1, capacity=10)
    assert len(cache.arenas) == 1
    monkeypatch.setattr("decode.cache.SMALL_BYTES", bytes_of(cache))
    assert len(filled_cache(layers=20, batch=1, capacity=10).arenas) == 1
    cache.reserve(11)
    assert [len(arena.buffer) for arena in cache.arenas] == [4] * 10


def test_long_texts_grow_by_pieces() -> None:
    """Doubling 32k slots for one token would need the memory of three such texts."""
    cache = cache_of(tiny_model("llama"), 1, capacity=MAX_GROWTH * 2)
    append(cache, [[0.0] * MAX_GROWTH * 2])
    cache.commit_prompt([MAX_GROWTH * 2])
    append(cache, [[1.0]])
    assert cache.capacity == MAX_GROWTH * 3
