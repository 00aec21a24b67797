"""Grouped-query attention of several tokens with a mask, without copies of the keys for every query head.

If g query heads share a key head, transformers' sdpa copies keys and values g times in forwards of several tokens with
a mask. For 32 query heads, 8 key heads, 8192 tokens of context and 16 nodes, copies take three quarters of attention's
time. Here the g heads become g x N queries of one key head. Results are equal up to rounding.

`sdpa_grouped` is registered as "sdpa" once, because some models (Falcon, Gemma 4, DeepSeek 3.2) choose masks by that
name. It does its work only in a thread's forwards inside `grouped`; all others get transformers' own function.

Shapes: B rows of the batch, H query heads on H / g key heads, N tokens, S cache slots, D head size."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decode.ops.split_attention import attention_in_parts, num_parts
from medusa.tree_support import Mask

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
    plain = attention_mask is None or attention_mask.shape[1:3] != (1, tokens) or len(key) != batch
    others = any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    plain = plain or others or torch.is_grad_enabled() or not _HERE.depth
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
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def _repeated(mask: Tensor, groups: int) -> Tensor:
    """Repeat a mask [B, 1, N, S] for g = `groups` query heads: [B, 1, g N, S]. A forward repeats a shared mask once."""
    # In compiled code, the compiler finds the equal masks of the layers.
    known = None if torch.compiler.is_compiling() else _HERE.repeated.get(id(mask))
    if known is not None and groups in known:
        return known[groups]
    slots = mask.shape[-1]
    # Kernels on a GPU need rows that are a multiple of 8 elements apart, or copy the mask in every layer.
    repeated = torch.cat([F.pad(mask, (0, -slots % 8))] * groups, dim=2)[..., :slots]
    if known is not None:
        known[groups] = repeated
    return repeated


class _Here(threading.local):
    """Whether this thread is in a forward that takes grouped attention, and the masks that its layers share."""

    depth = 0  # of `grouped` contexts
    repeated: Mapping[int, dict[int, Tensor]] = MappingProxyType({})
    """For each mask, by its id: the repeated mask for each g, once made."""


_HERE = _Here()


class grouped:
    """While the context is open, sdpa attention of this thread's forwards is `sdpa_grouped`.

    `masks` [B, 1, N, S] are those of one forward: one for all layers, or one for each kind of layer; layers share the
    masks that they repeat for query heads. A function that the user has registered as "sdpa" stays."""

    def __init__(self, config: PretrainedConfig, masks: Mask | None = None) -> None:
        """Prepare for a forward of the model with this `config`."""
        self.used = config._attn_implementation == SDPA
        self.masks = (masks,) if isinstance(masks, Tensor) else () if masks is None else masks.values()

    def __enter__(self) -> None:
        if self.used:
            if ALL_ATTENTION_FUNCTIONS[SDPA] is sdpa_attention_forward:
                AttentionInterface.register(SDPA, sdpa_grouped)
            self.before, _HERE.repeated = _HERE.repeated, {id(mask): {} for mask in self.masks}
            _HERE.depth += 1

    def __exit__(self, *error: object) -> None:
        if self.used:
            _HERE.depth -= 1
            _HERE.repeated = self.before
