"""Heads that guess among the most frequent tokens only (FR-Spec, arXiv 2502.14856; EAGLE-3's draft vocabulary).

Most of an LM head's 128,000 rows belong to tokens that hardly ever occur. Heads with a `vocabulary` of N tokens give N
logits, the most frequent token first; `token_ids` maps places in this list to tokens. Heads never guess tokens outside
the list; the backbone still writes them, one step later.

Shapes: V the backbone's vocabulary, N the heads', H hidden size.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.heads.independent import LMHead, MedusaHeads

ABSENT = -1
"""The place of a token outside the list."""


# For each living set of heads: an LM head's weights [V, H], the heads' vocabulary, and the rows made of both.
_ROWS: weakref.WeakKeyDictionary[MedusaHeads, tuple[weakref.ref[Tensor], Tensor, nn.Linear]]
_ROWS = weakref.WeakKeyDictionary()


def lm_head_for(heads: MedusaHeads, backbone: Backbone) -> LMHead:
    """The LM head for heads that share one: the backbone's, or its rows for the heads' tokens.

    It maps hidden [..., H] to logits [..., V] or [..., N] in the dtype of its weights.
    """
    if heads.vocabulary is None or heads.lm_heads is not None:
        return backbone.lm_head
    rows = rows_for(heads, backbone.head)
    return lambda hidden: rows(hidden.to(rows.weight.dtype))


def rows_for(heads: MedusaHeads, lm_head: nn.Module) -> nn.Linear:
    """The rows [N, H] of an LM head [V, H] that the heads use; the LM head itself for heads without a `vocabulary`.

    The rows are copied once and kept while the LM head stays the same.
    """
    if not isinstance(lm_head, nn.Linear):
        raise TypeError(f"the backbone's LM head is a {type(lm_head).__name__}; a Linear is needed here")
    if heads.vocabulary is None:
        return lm_head
    weight, bias = lm_head.weight, lm_head.bias
    if heads in _ROWS:
        of, vocabulary, rows = _ROWS[heads]
        same = of() is weight and vocabulary is heads.vocabulary
        if same and (rows.weight.dtype, rows.weight.device) == (weight.dtype, weight.device):
            return rows
    ids = heads.vocabulary.to(weight.device)
    rows = nn.Linear(weight.shape[1], len(ids), bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
    _ROWS[heads] = weakref.ref(weight), heads.vocabulary, rows
    return rows


def token_ids(heads: MedusaHeads, places: Tensor) -> Tensor:
    """Places [...] among the heads' logits -> the tokens [...] at these places."""
    return places if heads.vocabulary is None else heads.vocabulary.to(places.device)[places]


def places_of(vocabulary: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Tokens [...] of a backbone with `vocab_size` tokens -> their places in `vocabulary` [N], or ABSENT [...]."""
    places = torch.full((vocab_size,), ABSENT, dtype=torch.long, device=ids.device)
    places[vocabulary.to(ids.device)] = torch.arange(len(vocabulary), device=ids.device)
    return places[ids]


def over_all(heads: MedusaHeads, logits: Tensor, vocab_size: int) -> Tensor:
    """Spread logits [..., N] over all V tokens: [..., V], with -inf for tokens that the heads never guess."""
    if heads.vocabulary is None:
        return logits
    spread = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    spread[..., heads.vocabulary.to(logits.device)] = logits
    return spread
