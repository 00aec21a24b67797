"""Attention of several tokens with a mask, without copying keys for every query head.

Where g query heads share a key head, transformers' sdpa copies keys and values g times for any forward of more than
one token with a mask: for 32 heads on 8 and 8192 tokens of context that is three quarters of a 16-node step's
attention. The g heads can stand behind each other as g x N queries of the one key head instead. The numbers are the
same, on a CPU to the last bit.

Shapes: B rows, H query heads on H / g key heads, N tokens, S slots, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_grouped"
HELD_AS = "_attn_implementation_internal"
"""Where transformers' configurations keep the name of their attention."""


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
    """query [B, H, N, D], key and value [B, H / g, S, D] -> [B, N, H, D]: transformers' sdpa, in its form."""
    batch, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    grouped = groups > 1 and tokens > 1 and attention_mask is not None and attention_mask.shape[1] == 1
    if not grouped or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    out = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key.shape[1], groups * tokens, size),
        key,
        value,
        attn_mask=torch.cat([attention_mask] * groups, dim=2),
        dropout_p=dropout,
        scale=scaling,
    )
    return out.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def implementation(config: PretrainedConfig) -> str | None:
    """The name of a model's own attention, whether or not another thread is inside `grouped` just now."""
    name = getattr(config, "_attn_implementation", None)
    return "sdpa" if name == NAME else name


AttentionInterface.register(NAME, sdpa_grouped)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped(config: PretrainedConfig) -> Iterator[None]:
    """Let a model with sdpa attention take this one for as long as the context lasts; all others stay as they are.

    A model that another thread runs meanwhile computes the same with either.
    """
    # Past the property, which checks all of the configuration at each assignment: 0.1 ms.
    held = vars(config)
    if held.get(HELD_AS) not in ("sdpa", NAME):
        yield
        return
    held[HELD_AS] = NAME
    try:
        yield
    finally:
        held[HELD_AS] = "sdpa"
