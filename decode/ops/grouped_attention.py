"""Grouped-query attention of several tokens with a mask, without copies of the keys for every query head.

If g query heads share a key head, transformers' sdpa copies keys and values g times in forwards of several tokens with
a mask. For 32 query heads, 8 key heads, 8192 tokens of context and 16 nodes, copies take three quarters of attention's
time. Here the g heads become g x N queries of one key head. Results are equal up to rounding, and on a CPU bit by bit.

`sdpa_grouped` is registered as "sdpa", because some models (Falcon, Gemma 4, DeepSeek 3.2) choose masks by that name.

Shapes: B rows of the batch, H query heads on H / g key heads, N tokens, S cache slots, D head size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

SDPA = "sdpa"


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
    masked = attention_mask is not None and attention_mask.shape[1:3] == (1, tokens)
    grouped = masked and groups > 1 and len(key) == batch and not torch.is_grad_enabled()
    if not grouped or any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap")):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    out = F.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * tokens, size),
        key,
        value,
        attn_mask=_repeated(attention_mask, groups),
        dropout_p=dropout,
        scale=scaling,
    )
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


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


_LOCK = Lock()
_active = 0  # contexts of `grouped` that are open, in all threads
_shared: ContextVar[Mapping[int, dict[int, Tensor]]] = ContextVar("_shared", default=MappingProxyType({}))
"""For each mask that all layers of this thread's forward share, by its id: the repeated mask for each g, once made."""


@contextmanager
def grouped(config: PretrainedConfig, masks: Tensor | Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """While the context is open, run sdpa attention by `sdpa_grouped`, if the model with this `config` uses sdpa.

    `masks` [B, 1, N, S] are those of one forward: one for all layers, or one for each kind of layer. The context
    replaces transformers' own function in the global registry, also for other threads; their results stay equal up to
    rounding, and their gradients the same. A function that the user has registered stays."""
    if config._attn_implementation != SDPA:
        yield
        return
    shared = masks.values() if isinstance(masks, Mapping) else () if masks is None else (masks,)
    token = _shared.set({id(mask): {} for mask in shared})
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        _shared.reset(token)


def _count(change: int) -> None:
    """Count open contexts of `grouped`: `change` is 1 or -1. The first context replaces sdpa; the last restores it."""
    global _active
    with _LOCK:
        _active += change
        old, new = (sdpa_attention_forward, sdpa_grouped) if _active else (sdpa_grouped, sdpa_attention_forward)
        if ALL_ATTENTION_FUNCTIONS[SDPA] is old:
            AttentionInterface.register(SDPA, new)
