"""Grouped-query attention of several tokens with a mask, without copies of the keys for every query head.

If g query heads share a key head, transformers' sdpa copies keys and values g times in forwards of several tokens with
a mask. For 32 query heads, 8 key heads, 8192 tokens of context and 16 nodes, copies take three quarters of attention's
time. Here the g heads become g x N queries of one key head. Results are equal up to rounding.

On a CPU, PyTorch's kernel is slow for heads of 8 numbers, as the smallest models have; one text then takes products.

`sdpa_grouped` is registered as "sdpa", because some models (Falcon, Gemma 4, DeepSeek 3.2) choose masks by that name.

Shapes: B rows of the batch, H query heads on H / g key heads, N tokens, S cache slots, D head size."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.ops.shared_setting import Restore, SharedSetting
from decode.ops.split_attention import attention_in_parts, num_parts
from medusa.tree_support import Mask

SDPA = "sdpa"
TINY_HEAD, MIN_QUERIES, MAX_SCORES = 8, 16, 2**18
"""Matrix products are faster for heads of so many numbers, from so many queries of a key head on (a layer of
stories260K: 29 instead of 33 us for 22 queries and 150 slots), and while their scores [H, N, S] are in fast memory."""
MAX_COMPILED = MAX_SCORES // 512
"""The most queries of all key heads for which compiled steps take products. They must not ask for the number of slots,
so this assumes 512, the context of stories260K."""


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
    """Compute attention for g query heads per key head without copies of the keys, in place of transformers' sdpa.

    `query` is [B, H, N, D] for B rows, H heads, N tokens and head size D; `key` and `value` are [B, H / g, S, D] for S
    cache slots. Returns the result [B, N, H, D], and `None` for attention weights. Transformers' own function computes
    what decoding never asks for: gradients, a paged cache, or one mask row for several tokens."""
    batch, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    plain = attention_mask is None or attention_mask.shape[1:3] != (1, tokens) or len(key) != batch
    others = any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    plain = plain or others or torch.is_grad_enabled()
    parts = 1
    if not plain and dropout == 0:
        assert attention_mask is not None
        parts = num_parts(query.reshape(batch, key.shape[1], -1, size), key, value, attention_mask)
    if plain or (groups == 1 and parts == 1):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    query, mask = query.reshape(batch, key.shape[1], groups * tokens, size), _repeated(attention_mask, groups)
    if parts > 1:
        scale = size**-0.5 if scaling is None else scaling
        out = attention_in_parts(query, key, value, mask, scale, parts)
        return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None
    if scaling is not None and dropout == 0 and _favours_products(query, key, mask):
        out = _by_products(query, key, value, mask, scaling).view(value.shape[1], -1, groups, tokens)
        return out.permute(3, 0, 2, 1).reshape(1, tokens, heads, -1), None
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _favours_products(query: Tensor, key: Tensor, mask: Tensor) -> bool:
    """Whether `_by_products` is faster than PyTorch's sdpa for `query` [B, K, Q, D] and `key` [B, K, S, D]."""
    batch, heads, queries, size = query.shape
    fits = batch == 1 and size <= TINY_HEAD and queries >= MIN_QUERIES
    if not fits or not query.is_cpu or query.dtype != torch.float32 or mask.dtype != torch.float32:
        return False
    if torch.compiler.is_compiling():  # a comparison of the slots would limit the compiled code to their number
        return heads * queries <= MAX_COMPILED
    return heads * queries * key.shape[2] <= MAX_SCORES


def _by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Compute attention of one text by matrix products: queries [1, K, Q, D] on K key heads with a mask [1, 1, Q, S].

    Returns the result as [K, D, Q], because the product of transposed matrices is faster."""
    scores = torch.baddbmm(mask[0].expand(len(key[0]), -1, -1), query[0], key[0].mT, alpha=scaling)
    return torch.bmm(value[0].mT, scores.softmax(-1).mT)


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask [B, 1, N, S] for g = `groups` query heads: [B, 1, g N, S]. A forward repeats a shared mask once."""
    # In compiled code, the compiler finds the equal masks of the layers.
    known = None if torch.compiler.is_compiling() else _shared.get().get(id(mask))
    if known is not None and groups in known:
        return known[groups]
    slots = mask.shape[-1]
    # Kernels on a GPU need rows that are a multiple of 8 elements apart, or copy the mask in every layer.
    repeated = torch.cat([F.pad(mask, (0, -slots % 8))] * groups, dim=2)[..., :slots]
    if known is not None:
        known[groups] = repeated
    return repeated


_shared: ContextVar[Mapping[int, dict[int, Tensor]]] = ContextVar("_shared", default=MappingProxyType({}))
"""For each mask that all layers of this thread's forward share, by its id: the repeated mask for each g, once made."""


class sharing:
    """While the context is open, layers of this thread's forward share the `masks` that they repeat for query heads.

    `masks` [B, 1, N, S] are those of one forward: one for all layers, or one for each kind of layer."""

    def __init__(self, masks: Mask | None) -> None:
        self.masks = (masks,) if isinstance(masks, Tensor) else () if masks is None else masks.values()

    def __enter__(self) -> None:
        self.token = _shared.set({id(mask): {} for mask in self.masks})

    def __exit__(self, *error: object) -> None:
        _shared.reset(self.token)


def grouped(config: PretrainedConfig) -> AbstractContextManager[None]:
    """While the context is open, run sdpa attention by `sdpa_grouped`, if the model with this `config` uses sdpa.

    The context replaces transformers' own function in the global registry, also for other threads; their results stay
    equal up to rounding, and their gradients the same. A function that the user has registered stays."""
    return _GROUPED if config._attn_implementation == SDPA else nullcontext()


def _replace() -> Restore:
    if ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_attention_forward:  # a function that the user has registered stays
        AttentionInterface.register(SDPA, sdpa_grouped)
    return _put_back


def _put_back() -> None:
    if ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_grouped:
        AttentionInterface.register(SDPA, sdpa_attention_forward)


_GROUPED = SharedSetting(_replace)
