"""Attention of several tokens with a mask: grouped queries without copies of the keys, and keys in parts on a GPU.

If g query heads share a key head, transformers' sdpa copies keys and values g times in forwards of several tokens with
a mask. For 32 query heads, 8 key heads, 8192 tokens of context and 16 nodes, copies take three quarters of attention's
time. Here the g heads become g x N queries of one key head. Results are equal up to rounding.

`sdpa_grouped` is registered as "sdpa" once, because some models (Falcon, Gemma 4, DeepSeek 3.2) choose masks by that
name. It does its work only in a thread's forwards inside `grouped`; all others get transformers' own function.

With a mask, PyTorch's attention on a GPU leaves 64 queries of a head and all of their keys to one multiprocessor. A
step of one text has 32 such pieces or fewer, and an H100 has 132 multiprocessors: at 2,000 tokens of text, attention of
a layer of 32 heads took 87 us, twelve times as long as memory needs. So compiled steps on a GPU compute attention to
each of P parts of the keys alone, in one call, and combine the results by their log-sum-exp (flash-decoding: Dao et
al., 2023).

In a batch on a CPU, most texts are shorter than the longest, and to read the slots beyond their ends takes time. So the
rows are cut into runs of about the same length, each of which has its own number of slots (`runs_of`).

With `--numerics stable`, attention is computed in float64. In a tree, other slots lie between those that a node sees
than in plain decoding, so its sums add the same numbers in another order. Float64's rounding is so far below that of
the model's dtype that the rounded results are equal (`decode.stable`).

Shapes: B rows of the batch, H query heads on K = H / g key heads, N tokens, Q = g N queries of a key head, S cache
slots, D head size, P parts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.ops import tree_attention
from medusa.attention import attention

SDPA = "sdpa"
PIECES = 256
"""Pieces of work for a GPU with some 130 multiprocessors, each of which computes one or two at a time."""
QUERIES = 64
"""Queries of a piece in PyTorch's kernel."""
MOST_PARTS = 16
"""Maximum number of parts. The combination of 32 parts took as long as attention itself (11 us a layer on an H200)."""
CALL = 160_000
"""Bytes of keys and values that attention reads while another call starts: 42 us on a core of an Intel Xeon."""
MOST_ROWS_OF_RUN = 64
MOST_ROWS = 4
"""Rows of a batch that are split; for more, a call for each row takes longer than one call for all."""


def sdpa_grouped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention of `query` [B, H, N, D] to `key` and `value` [B, K, S, D], in place of transformers' sdpa.

    Returns the result [B, N, H, D], and `None` for attention weights. Transformers' own function computes what decoding
    never asks for: gradients, a paged cache, or one mask row for several tokens."""
    if _HERE.stable and query.dtype != torch.float64:
        wide, keys, values = (part.double() for part in (query, key, value))
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = once(attention_mask, "double", Tensor.double)
        out, _ = sdpa_grouped(module, wide, keys, values, attention_mask, dropout, scaling, **kwargs)
        return out.to(query.dtype), None
    batch, heads, tokens, size = query.shape
    others = [kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap", "s_aux")]
    if _HERE.depth and attention_mask is not None and tree_attention.is_seen(attention_mask):
        if not (dropout or any(others)) and tree_attention.takes(query, key, value):
            scale = size**-0.5 if scaling is None else scaling
            return tree_attention.attention(query, key, value, attention_mask, scale), None
        seen, slots, dtype = attention_mask, key.shape[2], query.dtype
        attention_mask = once(seen, (slots, dtype), lambda seen: tree_attention.mask_of(seen, slots, dtype))
    is_single = tokens == 1 and query.device.type == "cpu"
    groups = 1 if is_single else heads // key.shape[1]  # `attention` chooses the form of single queries
    mask = None if attention_mask is None or attention_mask.shape[1:3] != (1, tokens) else attention_mask
    alone = attention_mask is None and is_single  # one token that sees all slots
    if (mask is None and not alone) or len(key) != batch or any(others) or torch.is_grad_enabled() or not _HERE.depth:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    if mask is None:
        return attention(query, key, value, mask, scaling, dropout).transpose(1, 2).contiguous(), None
    own = query if groups == 1 else query.reshape(batch, key.shape[1], groups * tokens, size)
    parts = 1 if dropout else num_parts(own, key, value, mask)
    runs = _HERE.runs
    if runs and (len(mask) != batch or key.shape[2] != longest(runs)):
        runs = ()
    if groups == parts == 1 and not runs and tokens > 1:
        mask = once(mask, groups, lambda mask: mask)
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    mask = once(mask, groups, lambda mask: repeated(mask, groups))
    if parts > 1:
        out = attention_in_parts(own, key, value, mask, size**-0.5 if scaling is None else scaling, parts)
    elif runs:
        out = torch.cat([attention_of_run(run, own, key, value, mask, dropout, scaling) for run in runs])
    else:
        out = attention(own, key, value, mask, scaling, dropout)
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def repeated(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask [B, 1, N, S] for the g heads of a key head; returns [B, 1, Q, S].

    Kernels on a GPU need rows that are a multiple of 8 elements apart, or copy the mask."""
    slots = mask.shape[-1]
    return torch.cat([F.pad(mask, (0, -slots % 8))] * groups, dim=2)[..., :slots]


def once(mask: Tensor, use: object, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Give `make(mask)`, which the first layer of a forward with this mask makes for a `use`.

    torch.compile would compute it in each layer again, from its first numbers on, but keeps what was written."""
    for whole, of_use, made in _HERE.masks:
        if whole is mask and of_use == use:
            return made
    made = make(mask)
    if torch.compiler.is_compiling():
        rows = torch.arange(len(made), device=made.device)
        made = torch.empty_like(made).index_copy(0, rows, made)
    if _HERE.depth:
        _HERE.masks = (*_HERE.masks, (mask, use, made))
    return made


class Run(NamedTuple):
    """Rows of a batch that lie side by side, and the number of slots that the longest of them needs."""

    rows: slice
    width: int


def longest(runs: tuple[Run, ...]) -> int:
    """The slots of the whole batch."""
    return max(run.width for run in runs)


def attention_of_run(
    run: Run, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scale: float | None
) -> Tensor:
    """Compute attention of the rows of a run, out of all rows' tensors, to their own slots."""
    key, value = key[run.rows, :, : run.width], value[run.rows, :, : run.width]
    masks = mask[run.rows, ..., : run.width]
    return attention(query[run.rows], key, value, masks, scale, dropout)


def runs_of(widths: Sequence[int], bytes_per_slot: int) -> tuple[Run, ...]:
    """Cut the rows of a batch into the runs whose attention takes the least time; none if all belong together.

    Row b needs `widths[b]` slots, of `bytes_per_slot` in a layer. Rows stay in their order, as sorting would copy keys.
    """
    call = CALL / bytes_per_slot  # slots that could be read instead of another call
    costs, starts = [0.0], [0]  # of the best runs of the first 0, 1, 2, ... rows, and where the last of them starts
    for end in range(1, len(widths) + 1):
        width, best = 0, (float("inf"), 0)
        for start in range(end - 1, max(end - MOST_ROWS_OF_RUN, 0) - 1, -1):
            width = max(width, widths[start])
            best = min(best, (costs[start] + call + (end - start) * width, start))
        costs.append(best[0])
        starts.append(best[1])
    runs, end = [], len(widths)
    while end:
        runs.append(Run(slice(starts[end], end), max(widths[starts[end] : end])))
        end = starts[end]
    return tuple(reversed(runs)) if len(runs) > 1 else ()


class _Here(threading.local):
    """Whether this thread is in a forward that takes grouped attention, and in a stable one; the runs of its rows."""

    depth = stable = 0  # of `grouped` contexts
    runs: tuple[Run, ...] = ()
    masks: tuple[tuple[Tensor, object, Tensor], ...] = ()  # what `once` has made in this forward


_HERE = _Here()


class _Cudnn:
    """Keeps attention by cuDNN switched off while forwards of any thread are in `grouped`.

    PyTorch prefers it on recent GPUs. It makes a plan for each length of keys, which decoding changes in every step (23
    to 37 ms on an H100), and it was wrong without an error (pytorch#193893, #196678)."""

    open, before, lock = 0, True, threading.Lock()

    def count(self, more: int) -> None:
        if torch.compiler.is_compiling():  # a compiled step runs in a context that was opened before
            return
        with self.lock:
            if not self.open:
                self.before = torch.backends.cuda.cudnn_sdp_enabled()
            self.open += more
            torch.backends.cuda.enable_cudnn_sdp(self.before and not self.open)


_CUDNN = _Cudnn()


class grouped:
    """While the context is open, sdpa attention of this thread's forwards is `sdpa_grouped`.

    A function that the user has registered as "sdpa" stays."""

    def __init__(self, config: PretrainedConfig, stable: bool = False, runs: tuple[Run, ...] = ()) -> None:
        """Prepare for a forward of the model with this `config`, whose rows are `runs`.

        `stable`: compute attention in float64."""
        self.used, self.stable, self.runs = config._attn_implementation == SDPA, stable, runs

    def __enter__(self) -> None:
        if self.used:
            _CUDNN.count(1)
            if ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_attention_forward:
                AttentionInterface.register(SDPA, sdpa_grouped)
            _HERE.depth += 1
            _HERE.stable += self.stable
            self.runs, _HERE.runs = _HERE.runs, self.runs
            self.masks, _HERE.masks = _HERE.masks, ()

    def __exit__(self, *error: object) -> None:
        if self.used:
            _CUDNN.count(-1)
            _HERE.depth -= 1
            _HERE.stable -= self.stable
            _HERE.runs, _HERE.masks = self.runs, self.masks


def uses_own_sdpa(config: PretrainedConfig) -> bool:
    """Whether attention in our forwards of a model with this `config` is `sdpa_grouped`."""
    own = ALL_ATTENTION_FUNCTIONS[SDPA] in (sdpa_grouped, sdpa_attention_forward)
    return own and config._attn_implementation == SDPA


def hidden_score(dtype: torch.dtype) -> float:
    """Return what is added to hidden scores. It is far below any score; the lowest float32 overflows in the kernel."""
    return max(-1e30, torch.finfo(dtype).min)


def num_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> int:
    """Choose the number of parts for queries [B, K, Q, D], keys [B, K, S, D] and values [B, K, S, D']; 1: no split.

    Only compiled steps on an NVIDIA GPU are split: in eager steps, the host would have to launch more kernels. Autocast
    converts what PyTorch's attention reads, but not what its kernel reads, so tensors of one dtype are split only."""
    gpu = query.is_cuda and torch.version.cuda and query.dtype in tree_attention.DTYPES
    if not (torch.compiler.is_compiling() and gpu):
        return 1
    if not query.dtype == key.dtype == value.dtype == mask.dtype or torch.is_autocast_enabled(query.device.type):
        return 1
    batch, heads, queries, size = query.shape
    pieces = heads * -(-queries // QUERIES)  # of a row
    if batch > MOST_ROWS or 2 * batch * pieces >= PIECES:
        return 1
    # Last, because a condition on the number of slots limits the compiled code.
    if size % 8 or value.shape[-1] % 8 or key.shape[2] % (8 * MOST_PARTS):  # the kernel reads 8 numbers at once
        return 1
    return min(MOST_PARTS, 1 << ((PIECES // pieces).bit_length() - 1))


def attention_in_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, parts: int) -> Tensor:
    """Compute attention of `query` [B, K, Q, D] to `key` and `value` [B, K, S, D], with an additive mask [B, 1, Q, S].

    Returns [B, K, Q, D]. S must be a multiple of 8 P, so that each part of the mask is aligned to 16 bytes. Rows are
    computed in turn, because the parts of several rows lie too irregularly in memory for one call without a copy."""
    mask = once(mask, "parts", lambda mask: mask.clamp_min(hidden_score(mask.dtype)))
    rows = zip(query.split(1), key.split(1), value.split(1), mask.expand(len(query), -1, -1, -1).split(1), strict=True)
    return torch.cat([_of_row(*tensors, scale, parts) for tensors in rows])


def _of_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, parts: int) -> Tensor:
    """Compute attention of one row; the parts of its keys become the rows of a batch."""
    heads, queries = query.shape[1:3]
    keys, values = (states[0].unflatten(1, (parts, -1)).transpose(0, 1) for states in (key, value))  # [P, K, S / P, D]
    masks = mask[0, 0].unflatten(1, (parts, -1)).transpose(0, 1)  # [P, Q, S / P]
    masks = masks[:, None].expand(-1, heads, -1, -1)
    out, logsumexp = _attention(query.expand(parts, -1, -1, -1), keys, values, masks, scale)
    weights = logsumexp[:, :, :queries].float().softmax(0)[..., None]  # the kernel rounds Q up to a multiple of 32
    return (weights * out.float()).sum(0, keepdim=True).to(out.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention by PyTorch's kernel with a mask, and the log-sum-exp of the scores [B, K, Q or more]."""
    if query.is_cuda:
        out = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, mask, True, scale=scale)
    else:
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)
    return out[0], out[1]
