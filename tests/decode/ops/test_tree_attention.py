"""decode/ops/tree_attention.py: what nodes see in numbers, and attention by Triton kernels, run by its interpreter."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode import generate
from decode.cache import TreeCache
from decode.compiled.region import Regions
from decode.ops import tree_attention
from decode.ops.tree_attention import TRIED, mask_of, seen_by, takes
from decode.reader import Reader, visible_slots
from decode.topology import Topology
from decode.tree_check import check_tree_forward
from medusa import Tree
from medusa.backbone import Backbone
from medusa.tree_support import FULL_LAYER, LayerKind, additive
from tests.decode.ops.triton_on_cpu import kernels_on_cpu, needs_triton
from tests.helpers import FAMILIES, left_padded, plain, random_heads, random_ids, random_tree, tiny_model

KINDS = {"full": FULL_LAYER, "window": LayerKind(window=7), "chunk": LayerKind(chunk=5)}


def trees(rows: int, nodes: int, shared: bool) -> Topology:
    """Random trees of so many nodes, roots included: one for all rows, or one for each."""
    made = [random_tree(nodes - 1, seed, max_depth=9) if nodes > 1 else Tree.chain(0) for seed in range(rows)]
    if shared:
        return Topology.of(made[0])
    parent, depth = (torch.stack([getattr(tree, of) for tree in made]) for of in ("parent", "depth"))
    return Topology.from_parents(parent, depth, 9, nodes)


@pytest.mark.parametrize("nodes", [1, 13, 64])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_numbers_say_what_masks_say(kind: LayerKind, nodes: int) -> None:
    """For ragged rows, of which one is longer than the window, and windows that end within a path of the tree."""
    lengths = torch.tensor([40, 1, 3, 90])
    for tree in (trees(4, nodes, shared=True), trees(4, nodes, shared=False)):
        found = mask_of(seen_by(kind, tree.ancestors, lengths, tree.depth, tree.depth), 112, torch.float32)
        assert torch.equal(found, additive(visible_slots(tree, lengths, 112, kind), torch.float32)[:, None])


# The kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return kernels_on_cpu(monkeypatch)


def by_mask(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attention as it is defined, in float64; 0 for nodes that see nothing."""
    key, value = (part.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    scores = (query.double() @ key.mT * scale).masked_fill(mask_of(seen, key.shape[2], torch.float64) < 0, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2)


def drawn(seed: int) -> dict[str, Any]:
    """Shapes, of which each is drawn by its turn or at random; the first text is the longest."""
    rng = random.Random(seed)
    groups, nodes = 1 + 3 * seed % 8, [64, 1, 17, 5][seed // 2 % 4]
    heads, batch = (2, 2) if nodes < 17 else (1, rng.choice([1, 2]))
    length = 8192 - nodes if seed == 0 else rng.choice([1, 30, 300])
    return {
        "shape": (batch, groups, heads, nodes),
        "lengths": [length, *(rng.randint(1, length) for _ in range(batch - 1))],
        "sizes": [(64, 64), (32, 32), (96, 96), (128, 128), (256, 256), (192, 128)][seed % 6],
        "kind": rng.choice([FULL_LAYER, LayerKind(window=rng.choice([2, 40])), LayerKind(chunk=50)]),
        "dtype": [torch.float32, torch.bfloat16, torch.float16][seed % 3],
        "block": (64 if groups * nodes > 64 else 16, 1024 if seed == 0 else rng.choice([32, 64])),
        "splits": rng.choice([1, 3, 5]),
        "shared": rng.random() < 0.5,
    }


LONG: dict[str, dict[str, Any]] = {
    "a layer of Llama-3.1-8B": {"shape": (1, 4, 1, 64), "lengths": [2000], "kind": FULL_LAYER},
    "a window": {"lengths": [8188, 300], "kind": LayerKind(window=512), "dtype": torch.float32},
    "ragged": {"shape": (3, 8, 1, 4), "lengths": [8188, 1, 4000], "kind": FULL_LAYER, "splits": 5},
}
"""Cases of long texts, and what they have in common."""
COMMON = {"shape": (2, 4, 1, 4), "sizes": (128, 128), "dtype": torch.bfloat16, "block": (16, 1024), "splits": 3}
LONG = {name: COMMON | {"shared": False} | case for name, case in LONG.items()}


@needs_triton
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("case", [*map(drawn, range(12)), *(pytest.param(LONG[name], id=name) for name in LONG)])
def test_kernels_give_the_attention_of_masks(
    case: dict[str, Any], kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values are the first slots of a larger buffer, in which NaN follows the nodes."""
    (batch, groups, heads, nodes), (size, value_size) = case["shape"], case["sizes"]
    monkeypatch.setattr(kernels, "block", lambda *shape: case["block"])
    monkeypatch.setattr(kernels, "num_splits", lambda *shape: case["splits"])
    torch.manual_seed(0)
    lengths, slots = torch.tensor(case["lengths"]), max(case["lengths"]) + nodes + 5
    query = torch.randn(batch, nodes, groups * heads, size, dtype=case["dtype"]).transpose(1, 2)
    key = torch.randn(batch, heads, slots + 50, size, dtype=case["dtype"])
    value = torch.randn(batch, heads, slots + 50, value_size, dtype=case["dtype"])
    for row, length in enumerate(case["lengths"]):
        key[row, :, length + nodes :] = value[row, :, length + nodes :] = torch.nan
    tree, key, value = trees(batch, nodes, case["shared"]), key[:, :, :slots], value[:, :, :slots]
    seen = seen_by(case["kind"], tree.ancestors, lengths, tree.depth, tree.depth)
    found = tree_attention.attention(query, key, value, seen, 1.5 * size**-0.5)
    expected = by_mask(query, key.nan_to_num(0), value.nan_to_num(0), seen, 1.5 * size**-0.5)
    # float32: 1e-5, as sums of at most 8,256 terms are added in another order. Half precision rounds the weights, whose
    # sum is 1, and the result, of values up to about 4.
    allowed = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[case["dtype"]]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=allowed)


@needs_triton
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_a_row_that_is_longer_than_the_window_reads_no_further(kernels: ModuleType) -> None:
    """Such rows have ended. Where a layer's window leaves nothing to see, the result is 0."""
    query, key, value = torch.randn(1, 2, 3, 32), torch.randn(1, 1, 400, 32), torch.randn(1, 1, 400, 32)
    key[:, :, 300:] = value[:, :, 300:] = torch.nan
    tree = trees(1, 3, shared=True)
    for kind in (FULL_LAYER, LayerKind(window=20)):
        seen = seen_by(kind, tree.ancestors, torch.tensor([350]), tree.depth, tree.depth)
        inputs = query, key[:, :, :300], value[:, :, :300], seen, 0.2
        found = tree_attention.attention(*inputs)
        torch.testing.assert_close(found.double(), by_mask(*inputs), rtol=0, atol=1e-5)
    assert not found.any()


@needs_triton
@pytest.mark.parametrize(
    ("programs", "queries", "slots", "splits"),
    [
        (32, 256, 2048, 4),  # 64 nodes of Llama-3.1-8B, whose results would be more bytes than the keys
        (32, 256, 8192, 8),  # enough for all multiprocessors
        (8, 4, 8192, 32),  # plain decoding
        (8, 4, 511, 1),
        (512, 4, 8192, 1),  # a batch of 64
    ],
)
def test_splits(kernels: ModuleType, programs: int, queries: int, slots: int, splits: int) -> None:
    assert kernels.num_splits(programs, queries, slots) == splits


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize(("dtype", "size"), [("bf16", 128), ("fp16", 64), ("bf16", 256), ("fp32", 64)])
def test_kernels_compile_for_gpus(dtype: str, size: int) -> None:
    """For Ampere and Hopper, without one at hand; a multiprocessor of a GeForce has 99 KiB of fast memory."""
    code = f"from tests.decode.ops.triton_on_cpu import compile_kernels; compile_kernels({dtype!r}, {size})"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


# In models


@pytest.fixture
def used(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The queries of all calls of the kernels."""
    found, stock = list[Tensor](), kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda query, *args: found.append(query) or stock(query, *args))
    return found


@needs_triton
@pytest.mark.usefixtures("as_written")
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("family", "compiled"), [("llama", False), ("gemma3_text", True)])
def test_texts_are_equal(family: str, compiled: bool, used: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager and compiled steps; rows of a batch have different lengths."""
    monkeypatch.setattr(tree_attention, "TRIAL_LENGTHS", (130, 7))  # for the interpreter
    model = tiny_model(family)
    prompts = [random_ids(9), random_ids(5)]
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    inputs = left_padded(prompts)
    found = generate(model, random_heads(model), **inputs, tree=Tree.top_k([2, 2]), compile=compiled, **options)
    assert found[:, 9:].tolist() == [plain(model, prompt, max_new_tokens=5, eos_token_id=None) for prompt in prompts]
    assert TRIED[model] == {model.dtype}
    assert {query.shape[2] for query in used} >= {7}
    Regions.of(model).clear()


@needs_triton
@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("wrong", [slice(0, 0), slice(17, None)], ids=["right", "nodes after the 16th are wrong"])
def test_the_kernel_is_tried_with_full_trees(wrong: slice, used: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The trees of the self-test have eight nodes, after a few tokens."""
    stock = tree_attention._by_triton

    def faulty(*args: Any) -> Tensor:
        found = stock(*args)
        found[:, wrong] *= 1.5
        return found

    model = tiny_model("llama")
    monkeypatch.setattr(tree_attention, "TRIAL_LENGTHS", (130, 7))
    monkeypatch.setattr(tree_attention, "attention", faulty)
    with nullcontext() if wrong.stop == 0 else pytest.warns(UserWarning, match="takes masks, not the kernel: it is wr"):
        assert check_tree_forward(model).ok
    assert TRIED[model] == ({model.dtype} if wrong.stop == 0 else set())


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Let models read numbers, and attention make masks of them; gives those numbers."""
    found, stock = list[Tensor](), tree_attention.mask_of
    monkeypatch.setattr("decode.tree_check.runs_on", lambda device: True)
    monkeypatch.setattr(tree_attention, "mask_of", lambda seen, *args: found.append(seen) or stock(seen, *args))
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"falcon", "gemma2"}))
def test_models_pass_numbers_on(family: str, without_kernel: list[Tensor]) -> None:
    """With windows and chunks; what the kernel does not take gets a mask after all."""
    model = tiny_model(FAMILIES[family])
    assert check_tree_forward(model).ok
    assert TRIED[model] == {model.dtype}
    assert without_kernel


@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_that_fails_with_a_full_tree_is_not_used(
    fails: bool, without_kernel: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is a reason for masks, not an error of decoding."""
    shape = tree_attention.Shape(torch.device("cpu"), torch.float32, (4, 2), (16, 16))
    monkeypatch.setattr("decode.tree_check.recorded", lambda: nullcontext({shape}))
    if fails:
        monkeypatch.setattr(tree_attention, "attention", lambda *args: 1 / 0)
    else:
        monkeypatch.setattr(tree_attention, "attention", lambda query, *args: query.transpose(1, 2))
    model = tiny_model("llama")
    with pytest.warns(UserWarning, match="it raises ZeroDivisionError" if fails else "it is wrong after a long text"):
        assert check_tree_forward(model).ok
    assert not TRIED[model]


def test_a_model_with_attention_of_its_own_gets_masks(without_kernel: list[Tensor]) -> None:
    model = tiny_model("falcon, rope")
    with pytest.warns(
        UserWarning, match="FalconForCausalLM .falcon. takes masks, not the kernel: a tree forward raises"
    ):
        assert check_tree_forward(model).ok
    assert not TRIED[model]
    assert not without_kernel


def test_a_function_of_the_user_gets_masks(without_kernel: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is registered after the kernel was tried."""
    model = tiny_model("llama")
    assert check_tree_forward(model).ok
    reader = partial(Reader, Backbone(model), TreeCache(model.config, 1, 8, torch.device("cpu")))
    assert reader().by_kernel
    own = partial(sdpa_attention_forward)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", own)
    assert not reader().by_kernel
    without_kernel.clear()
    assert check_tree_forward(model).ok
    assert not without_kernel


def test_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NVIDIA GPUs from Ampere on, if Triton is installed."""
    gpu, capability = torch.device("cuda", 0), [(8, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(tree_attention, "find_spec", lambda name: name == "triton")
    where = tree_attention.runs_on.__wrapped__
    assert where(gpu)
    assert not where(torch.device("cpu"))
    capability[0] = 7, 5
    assert not where(gpu)
    capability[0] = 9, 0
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert not where(gpu)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(tree_attention, "find_spec", lambda name: None)
    assert not where(gpu)


def test_what_the_kernel_does_not_take(kernels_for_cpu: None) -> None:
    """Large heads, other dtypes, gradients, and what autocast would convert."""
    query, key = torch.empty(2, 4, 3, 64), torch.empty(2, 2, 9, 64)
    wide = torch.empty(2, 2, 9, 264)
    with torch.no_grad():
        assert takes(query, key, key)
        assert takes(query, key, wide[..., :256])
        assert not takes(query, key, wide)
        assert not takes(query[:, :3], key, key)
        assert not takes(query[:1], key, key)
        assert not takes(query, key, key.bfloat16())
        assert not takes(query.double(), key.double(), key.double())
        with torch.autocast("cpu", torch.bfloat16):
            assert not takes(query, key, key)
        assert not takes(query.to("meta"), key.to("meta"), key.to("meta"))
    with torch.enable_grad():
        assert not takes(query, key, key)


@pytest.fixture
def kernels_for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "DEVICES", {"cpu"})
