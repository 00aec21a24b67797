"""PyTorch's attention, with single queries in the form that its kernel for CPUs computes fastest.

For one query of a head, the kernel multiplies a matrix by a vector, and in bfloat16 it does that without vector
instructions. On an AMD EPYC with AVX-512, one token's attention of 32 heads on 8 key heads to 400 slots took 2.7 ms a
layer, and 0.2 ms as four queries of each key head (in float32: 0.30 and 0.16). Two equal queries of each of 12 heads
took a third of one's time.

Shapes: B rows, H query heads on K key heads, N queries, S slots, D and E sizes of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
    alone = queries == 1 and query.device.type == "cpu"
    if alone and heads != key.shape[1]:
        query = query.reshape(batch, key.shape[1], -1, size)
    elif alone and query.dtype == torch.bfloat16 and value.shape[-1] == size:  # others are computed by another kernel
        query = query.expand(-1, -1, 2, -1)
    groups = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, **groups)
    if query.shape[1] != heads:
        return out.reshape(batch, heads, 1, -1)
    return out[:, :, :queries]
