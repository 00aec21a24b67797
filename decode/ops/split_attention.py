"""Attention of a decoding step's few queries, split over the keys, so that every processor of a GPU takes part.

With a mask, PyTorch's attention on a GPU leaves 64 queries of a head and all of their keys to one multiprocessor. A
step of one text has 32 such pieces or fewer, and an H100 has 132 multiprocessors: at 2,000 tokens of text, attention of
a layer of 32 heads took 87 us, twelve times as long as memory needs. Here attention to each of P parts of the keys is
computed alone, in one call, and the results are combined by their log-sum-exp. (Flash-decoding: Dao et al., 2023.)
Results are equal up to rounding.

Shapes: B rows of the batch, K key heads, Q queries of a key head, S cache slots, D head size, P parts."""

from __future__ import annotations

import torch
from torch import Tensor

PIECES = 256
"""Pieces of work for a GPU with some 130 multiprocessors, each of which computes one or two at a time."""
QUERIES = 64
"""Queries of a piece in PyTorch's kernel."""
MOST_PARTS = 16
"""Maximum number of parts. The combination of 32 parts took as long as attention itself (11 us a layer on an H200)."""
MOST_ROWS = 4
"""Rows of a batch that are split; for more, a call for each row takes longer than one call for all."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Those of PyTorch's kernel."""


def hidden_score(dtype: torch.dtype) -> float:
    """Return what is added to hidden scores. It is far below any score; the lowest float32 overflows in the kernel."""
    return max(-1e30, torch.finfo(dtype).min)


def num_parts(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> int:
    """Choose the number of parts for queries [B, K, Q, D], keys [B, K, S, D] and values [B, K, S, D']; 1: no split.

    Only compiled steps on an NVIDIA GPU are split: in eager steps, the host would have to launch more kernels. Autocast
    converts what PyTorch's attention reads, but not what its kernel reads, so tensors of one dtype are split only."""
    if not (torch.compiler.is_compiling() and query.is_cuda and torch.version.cuda and query.dtype in DTYPES):
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
    rows = zip(query.split(1), key.split(1), value.split(1), mask.expand(len(query), -1, -1, -1).split(1), strict=True)
    return torch.cat([_of_row(*tensors, scale, parts) for tensors in rows])


def _of_row(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, parts: int) -> Tensor:
    """Compute attention of one row; the parts of its keys become the rows of a batch."""
    heads, queries = query.shape[1:3]
    keys, values = (states[0].unflatten(1, (parts, -1)).transpose(0, 1) for states in (key, value))  # [P, K, S / P, D]
    masks = mask[0, 0].clamp_min(hidden_score(mask.dtype)).unflatten(1, (parts, -1)).transpose(0, 1)  # [P, Q, S / P]
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
