"""The Triton kernels of `decode.ops.tree_attention`, which says what they compute; importing this needs Triton.

Programs share the work of a row's KV head: each takes ROWS of its queries and one split of its keys, in blocks of KEYS
slots. Blocks of text only need no bits. Softmax is computed online in powers of two: `most` is the greatest score of
each query so far, `total` the sum of its weights relative to that, and `acc` the weighted sum of values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64
"""Maximum number of queries of a program."""
PROGRAMS = 256
"""Programs for a GPU with some 130 multiprocessors, each of which computes one or two at a time."""
MIN_SLOTS = 256
"""Slots of the window for each split, at least."""
KEYS = 64
"""Slots of a block."""


JOINED = 32
"""Results of splits that a program combines."""


def block(num_bytes: int, size: int) -> tuple[int, int]:
    """Choose how many queries, and how many slots, a program reads at once; `num_bytes` are those of a number."""
    wide = num_bytes > 2
    return (16 if size > 64 else 32) if wide else MOST_ROWS, max(16, KEYS // 2) if wide or size > 128 else KEYS


def num_splits(programs: int, queries: int, slots: int) -> int:
    """Choose the number of splits of `slots` slots, if one split takes so many `programs`.

    A split has two slots or more for each of the `queries` of a KV head. So its results, in float32, have no more bytes
    than its keys and values."""
    return max(1, min(PROGRAMS // programs, slots // max(MIN_SLOTS, 2 * queries)))


def warps(size: int) -> int:
    """Choose the warps of a program, whose registers hold a result of ROWS x `size`."""
    return 8 if size > 128 else 4


def padded(size: int) -> int:
    """The size of a block that holds `size` elements: a power of two, and at least 16."""
    return int(max(16, triton.next_power_of_2(size)))


def attend(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Compute attention; for arguments and result see `decode.ops.tree_attention.attention`."""
    (batch, num_heads, nodes, size), (heads, slots) = query.shape, key.shape[1:3]
    queries, value_size = nodes * (num_heads // heads), value.shape[3]
    rows, keys = block(query.itemsize, max(size, value_size))
    rows = min(padded(queries), rows)
    tiles, lanes = triton.cdiv(queries, rows), batch * heads
    splits = num_splits(tiles * lanes, queries, slots)
    out = query.new_empty(batch, nodes, num_heads, value_size)
    parts = out if splits == 1 else out.new_empty(*out.shape[:3], splits, value_size, dtype=torch.float32)
    sums = parts if splits == 1 else parts.new_empty(parts.shape[:4])
    sees = sees.contiguous()
    query, key, value = (part if part.stride(3) == 1 else part.contiguous() for part in (query, key, value))
    attend_split[tiles, splits, lanes](
        query, key, value, sees, parts, sums, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        slots, nodes, heads, num_heads // heads, scale * 1.4426950408889634,
        SIZE=size, VALUE_SIZE=value_size, SPLIT=splits > 1, ROWS=rows, KEYS=keys,
        DIMS=padded(size), VALUE_DIMS=padded(value_size),
        num_warps=warps(size), num_stages=2,
    )  # fmt: skip
    if splits > 1:
        count, width = batch * nodes * num_heads, triton.next_power_of_2(splits)
        each = max(1, JOINED // width)
        join_splits[(triton.cdiv(count, each),)](
            parts, sums, out, count, splits, value_size, ROWS=each, SPLITS=width, DIMS=padded(value_size)
        )
    return out


@triton.jit(do_not_specialize=["slots", "nodes"])
def attend_split(
    query, key, value, sees, out, sums,
    query_row, query_head, query_node, key_row, key_head, key_slot,
    value_row, value_head, value_slot,
    slots, nodes, heads, groups, scale,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr,
):  # fmt: skip
    """Attend from ROWS queries of a KV head to one split of the keys; without SPLIT, `out` is the final result."""
    lane = tl.program_id(2)
    row, head = (lane // heads).to(tl.int64), lane % heads
    of_query = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = of_query < groups * nodes
    node, whole_head = of_query % nodes, head * groups + of_query // nodes
    size, value_size = tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)

    seen = sees + (row * nodes + node) * 4
    bits = tl.load(seen, mask=inside, other=0)
    length = tl.load(sees + row * nodes * 4 + 2).to(tl.int32)
    end = tl.minimum(tl.load(sees + row * nodes * 4 + 3).to(tl.int32), slots)
    first = tl.load(seen + 1, mask=inside, other=1 << 30).to(tl.int32)
    start = tl.minimum(tl.min(first, 0), length) // KEYS * KEYS
    each = tl.cdiv(tl.cdiv(tl.maximum(end - start, 0), KEYS), tl.num_programs(1)) * KEYS
    low = start + tl.program_id(1) * each
    high = tl.minimum(low + each, end)
    text = tl.maximum(low, tl.minimum(high, length) // KEYS * KEYS)  # from here on, blocks are not all text

    at_query = row * query_row + whole_head * query_head + node * query_node
    q = tl.load(query + at_query[:, None] + size[None, :], mask=inside[:, None] & (size < SIZE)[None, :], other=0.0)
    key += row * key_row + head.to(tl.int64) * key_head
    value += row * value_row + head.to(tl.int64) * value_head
    acc = tl.zeros([ROWS, VALUE_DIMS], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    most = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for at in tl.range(low, text, KEYS):
        acc, total, most = attend_block(
            acc, total, most, q, key, value, key_slot, value_slot, at, end, first, bits, length, scale,
            SIZE, VALUE_SIZE, KEYS, DIMS, VALUE_DIMS, False,
        )  # fmt: skip
    for at in tl.range(text, high, KEYS):
        acc, total, most = attend_block(
            acc, total, most, q, key, value, key_slot, value_slot, at, end, first, bits, length, scale,
            SIZE, VALUE_SIZE, KEYS, DIMS, VALUE_DIMS, True,
        )  # fmt: skip

    place = (row * nodes + node) * (heads * groups) + whole_head  # of a query in [B, N, H]
    none = total == 0.0
    acc = acc / tl.where(none, 1.0, total)[:, None]
    if SPLIT:
        place = place * tl.num_programs(1) + tl.program_id(1)
        tl.store(sums + place, tl.where(none, float("-inf"), most + tl.log2(total)), mask=inside)
    where = place[:, None] * VALUE_SIZE + value_size[None, :]
    tl.store(out + where, acc.to(out.dtype.element_ty), mask=inside[:, None] & (value_size < VALUE_SIZE)[None, :])


@triton.jit
def attend_block(
    acc, total, most, q, key, value, key_slot, value_slot,
    at, end, first, bits, length, scale,
    SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, VALUE_DIMS: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    """Attend to KEYS slots from slot `at` on, and add to `acc`, `total` and `most`; NODES: not all of them are text."""
    slot, size, value_size = at + tl.arange(0, KEYS), tl.arange(0, DIMS), tl.arange(0, VALUE_DIMS)
    there = slot < end
    k = tl.load(key + size[:, None] + slot[None, :] * key_slot, mask=(size < SIZE)[:, None] & there[None, :], other=0.0)
    scores = tl.dot(q, k, input_precision="ieee") * scale
    seen = slot[None, :] >= first[:, None]
    if NODES:
        node = slot - length
        bit = (bits[:, None] >> tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)[None, :]) & 1
        seen = tl.where((node < 0)[None, :], seen, bit == 1) & there[None, :]
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(most, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top)  # of a query that has seen no key yet
    weights = tl.exp2(scores - base[:, None])
    keep = tl.exp2(most - base)
    v = tl.load(
        value + slot[:, None] * value_slot + value_size[None, :],
        mask=there[:, None] & (value_size < VALUE_SIZE)[None, :],
        other=0.0,
    )
    acc = acc * keep[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, total * keep + tl.sum(weights, 1), top


@triton.jit(do_not_specialize=["queries", "splits"])
def join_splits(
    parts, sums, out, queries, splits, size,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    """Combine the results of all splits for ROWS queries by their log-sum-exp, whose powers of two are weights."""
    query = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, DIMS)
    place = query[:, None] * splits + split[None, :]
    there = (query < queries)[:, None] & (split < splits)[None, :]
    logs = tl.load(sums + place, mask=there, other=float("-inf"))
    top = tl.max(logs, 1)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[:, None])
    inside = (dim < size)[None, :]
    part = tl.load(parts + place[:, :, None] * size + dim, mask=there[:, :, None] & inside[None, :, :], other=0.0)
    total = tl.sum(weights, 1)
    found = tl.sum(part * weights[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    where = query[:, None] * size + dim[None, :]
    tl.store(out + where, found.to(out.dtype.element_ty), mask=(query < queries)[:, None] & inside)
