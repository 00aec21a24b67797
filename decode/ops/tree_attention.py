"""Attention of a draft's nodes by a Triton kernel, without a mask in memory.

What a node sees of its row's cache is one stretch of the text and some nodes of the draft, so four numbers say it all:
the nodes as bits, the first slot of the text that it sees (0, or where its window or chunk begins), the length of the
text, and the end of the draft. These numbers, int64 [B, 1, N, 4], take the place of a mask in a model's forward, one
tensor for each kind of layer. A mask is W / 4 times as long, is made once a step, copied in each layer with grouped
queries, and read by each KV head.

The kernel splits the keys of a row over programs, and a second one combines the results by their log-sum-exp
(flash-decoding: Dao et al., 2023). It reads each row's own text, or what windows leave of it, instead of the cache's
window.

Triton comes with PyTorch for CUDA and is not required. Without it, and for shapes that the kernel does not know,
attention takes masks (`decode.ops.attention`). Before the kernel is used in a model, `decode.tree_check` tries it.

Shapes: B rows, H query heads on K KV heads, N nodes, M slots of a draft, W slots of the window, D and D' head sizes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import library as operators

from medusa.tree_support import FULL_LAYER, LayerKind, additive

MOST_NODES = 64
"""Bits of a number."""
MOST_SIZE = 256
"""Size of a head up to which a block of keys fits into the fast memory of a multiprocessor."""
DEVICES = {"cuda"}
"""Types of devices on which the kernel runs; Triton's interpreter, in tests, runs it on CPUs."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TRIAL_LENGTHS = 4000, 37
"""Texts after which the kernel is tried with `MOST_NODES` nodes; the keys of the first are split."""
TRIAL_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}
"""The greatest errors that rounding may cause there: of the weights, whose sum is 1, and of results up to about 4."""
TRIED: weakref.WeakKeyDictionary[nn.Module, set[torch.dtype]] = weakref.WeakKeyDictionary()
"""The dtypes in which a model gives the same logits with the kernel as with masks."""


def seen_by(kind: LayerKind, own: Tensor, lengths: Tensor, depth: Tensor, slot_depths: Tensor) -> Tensor:
    """Say in numbers, int64 [B, 1, N, 4], what N nodes of `depth` [B or 1, N] see after texts of `lengths` [B] tokens.

    `own` [B or 1, N, M] is true for those of the M slots after the text, of depths `slot_depths` [B or 1, M], that a
    node sees wherever its layer's window or chunk ends; M is at most `MOST_NODES`."""
    slots, length = own.shape[2], lengths[:, None]
    position = length + depth
    allowed = kind.limited(own, position[:, :, None], (length + slot_depths)[:, None])
    bits = (allowed.long() << torch.arange(slots, device=own.device)).sum(-1)
    first = torch.zeros_like(position)
    if kind.window is not None:
        first = (position - (kind.window - 1)).clamp_min(0)
    if kind.chunk is not None:
        first = torch.maximum(first, position - position % kind.chunk)
    numbers = (bits, first, length, length + slots)
    return torch.stack([part.expand_as(position) for part in numbers], dim=-1)[:, None]


def is_seen(mask: Tensor | None) -> bool:
    """Whether a model's `mask` holds numbers of `seen_by`: no mask consists of integers."""
    return mask is not None and mask.dtype == torch.int64


def mask_of(seen: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Make the additive mask [B, 1, N, slots] that the numbers `seen` of `seen_by` stand for."""
    bits, first, length, end = seen[..., None].unbind(3)
    slot = torch.arange(slots, device=seen.device)
    node = slot - length
    allowed = torch.where(node < 0, slot >= first, (bits >> node.clamp(0, MOST_NODES - 1)) & 1 == 1)
    return additive(allowed & (slot < end), dtype)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel can attend from `query` [B, H, N, D] to `key` [B, K, W, D] and `value` [B, K, W, D'].

    Autocast converts what PyTorch's attention reads, but not what a kernel reads."""
    if query.device.type not in DEVICES or torch.is_autocast_enabled(query.device.type):
        return False
    same = query.dtype == key.dtype == value.dtype and len(query) == len(key)
    fits = max(key.shape[3], value.shape[3]) <= MOST_SIZE and query.shape[1] % key.shape[1] == 0
    return same and fits and query.dtype in DTYPES and not torch.is_grad_enabled()


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend from `query` [B, H, N, D] to what its nodes see, by the numbers `seen` of `seen_by`.

    Returns [B, N, H, D']. The result is 0 for a node that sees nothing, in a row that has ended."""
    found: Tensor = torch.ops.medusa.tree_attention(query, key, value, seen, scale)
    return found


class Shape(NamedTuple):
    """What calls of the kernel have in common in a layer."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]  # H, K
    sizes: tuple[int, int]  # D, D'


class _Calls(threading.local):
    """The shapes of this thread's calls of the kernel, where they are recorded."""

    shapes: set[Shape] | None = None


_CALLS = _Calls()


@contextmanager
def recorded() -> Iterator[set[Shape]]:
    """Give a set that holds, afterwards, the shapes of all calls of the kernel in the context."""
    shapes: set[Shape] = set()
    _CALLS.shapes = shapes
    try:
        yield shapes
    finally:
        _CALLS.shapes = None


def is_right(shape: Shape) -> bool:
    """Whether the kernel gives the attention of masks, for a long and a short text before a full tree.

    Keys, values and queries are random, the tree is a chain with a branch at each second node."""
    generator = torch.Generator().manual_seed(0)
    (heads, kv_heads), (size, value_size), nodes = shape.heads, shape.sizes, MOST_NODES
    slots, lengths = max(TRIAL_LENGTHS) + nodes, torch.tensor(TRIAL_LENGTHS)
    parents = [max(node - 1 - node % 2, 0) for node in range(nodes)]
    own, depth = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.long)
    for node, parent in enumerate(parents[1:], 1):
        own[node] |= own[parent]
        depth[node] = depth[parent] + 1
    seen = seen_by(FULL_LAYER, own[None], lengths, depth[None], depth[None]).to(shape.device)
    query, key, value = (
        torch.randn(len(lengths), *of, generator=generator).to(shape.device, shape.dtype)
        for of in ((heads, nodes, size), (kv_heads, slots, size), (kv_heads, slots, value_size))
    )
    found = attention(query, key, value, seen, size**-0.5).double()
    keys, values = (part.double().repeat_interleave(heads // kv_heads, 1) for part in (key, value))
    scores = query.double() @ keys.mT * size**-0.5 + mask_of(seen, slots, torch.float64)
    exact = (scores.softmax(-1) @ values).transpose(1, 2)
    return bool((found - exact).abs().max() <= TRIAL_ERRORS[shape.dtype])


def _by_triton(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    from decode.ops import tree_kernels  # needs Triton

    if _CALLS.shapes is not None:
        heads, sizes = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3])
        _CALLS.shapes.add(Shape(query.device, query.dtype, heads, sizes))
    with torch.cuda.device_of(query):  # Triton launches on the current device
        return tree_kernels.attend(query, key, value, seen, scale)


def _shape(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    rows, heads, nodes = query.shape[:3]
    return query.new_empty(rows, nodes, heads, value.shape[3])


if not hasattr(torch.ops.medusa, "tree_attention"):  # a module can be imported again
    schema = "(Tensor query, Tensor key, Tensor value, Tensor seen, float scale) -> Tensor"
    operators.define("medusa::tree_attention", schema)
    operators.impl("medusa::tree_attention", ("CPU", "CUDA"), _by_triton)
    operators.impl("medusa::tree_attention", "Meta", _shape)


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the kernel can run on `device`: an NVIDIA GPU from Ampere on, with Triton installed."""
    if device.type not in DEVICES or find_spec("triton") is None:
        return False
    return device.type != "cuda" or (bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (8, 0))
