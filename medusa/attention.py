"""PyTorch's attention, with single queries in the form that its kernel for CPUs computes fastest.

For one query of a head, the kernel multiplies a matrix by a vector. In bfloat16, AMD's CPUs do that without vector
instructions: on an EPYC with AVX-512, one token's attention of 32 heads on 8 key heads to 400 slots took 2.7 ms a
layer, and 0.2 ms as four queries of each key head (in float32: 0.30 and 0.16). Two equal queries of each of 12 heads
took a third of one's time. A Xeon with AMX is fast there: single queries of 9 heads on 3 key heads
take 0.73 to 0.77 of the time of groups, of 32 heads on 8 key heads 0.9, and of 28 on 4 1.4; two equal queries of 12
heads take four times as long as one.

Shapes: B rows, H query heads on K key heads, N queries, S slots, D and E sizes of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.cpu import cpuinfo

FEW_HEADS = 4 if any("amx_bf16" in flags.split() for flags in cpuinfo("flags")) else 0
"""Query heads of a key head up to which bfloat16's single queries are computed as they are."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention of `query` [B, H, N, D] to `key` [B, K, S, D] and `value` [B, K, S, E].

    Returns [B, H, N, E]. All heads share the `mask` [B or 1, 1, N, S], which is additive or says what is seen; `scale`
    is the factor of scores (default: 1 / sqrt(D)). Raises RuntimeError if K does not divide H."""
    batch, heads, queries, size = query.shape
    is_fast = query.dtype == torch.bfloat16 and heads <= FEW_HEADS * key.shape[1]
    alone = queries == 1 and query.device.type == "cpu" and not is_fast
    if alone and heads != key.shape[1]:
        query = query.reshape(batch, key.shape[1], -1, size)
    elif alone and query.dtype == torch.bfloat16 and value.shape[-1] == size:  # others are computed by another kernel
        query = query.expand(-1, -1, 2, -1)
    groups = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, **groups)
    if query.shape[1] != heads:
        return out.reshape(batch, heads, 1, -1)
    return out[:, :, :queries]
