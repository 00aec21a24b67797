"""Reduced vocabularies: heads that guess among the most frequent tokens only (FR-Spec, arXiv 2502.14856; EAGLE-3).

A modern LM head has about 128,000 rows, and most of the tokens are rare. Heads with a `vocabulary` of N tokens compute
only N logits. Index i of these logits belongs to token `vocabulary[i]`, the most frequent token first. Heads cannot
guess tokens outside the vocabulary, but the backbone can still generate them.

Shapes: V the backbone's vocabulary size, N the heads' vocabulary size, H hidden size, ... any positions."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.heads.independent import LMHead, MedusaHeads

ABSENT = -1  # the index that `places_of` returns for a token outside the heads' vocabulary

# A cache for each set of heads in memory: the LM head's weight [V, H], the heads' vocabulary, and the selected rows.
_ROWS = weakref.WeakKeyDictionary[MedusaHeads, tuple[weakref.ref[Tensor], Tensor, nn.Linear]]()


def lm_head_for(heads: MedusaHeads, backbone: Backbone) -> LMHead:
    """Return the function from features [..., H] to logits [..., V] for heads that share the backbone's LM head.

    H is the hidden size, V the vocabulary size. For heads with a reduced vocabulary of N tokens, V becomes N."""
    if heads.vocabulary is None or heads.lm_heads is not None:
        return backbone.lm_head
    rows = rows_for(heads, backbone.head)
    return lambda hidden: rows(hidden.to(rows.weight.dtype))


def rows_for(heads: MedusaHeads, lm_head: nn.Module) -> nn.Linear:
    """Return the LM head [V, H] or, if the heads' vocabulary is reduced, a copy with the rows [N, H] of its N tokens.

    The rows are copied once, and cached for as long as the weight and the vocabulary stay the same."""
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
    """Convert indices `places` [...] in the heads' vocabulary to token ids [...] (equal unless it is reduced)."""
    return places if heads.vocabulary is None else heads.vocabulary.to(places.device)[places]


def places_of(vocabulary: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Convert token ids [...] to their indices in `vocabulary` [N], with `ABSENT` for tokens outside it."""
    places = torch.full((vocab_size,), ABSENT, dtype=torch.long, device=ids.device)
    places[vocabulary.to(ids.device)] = torch.arange(len(vocabulary), device=ids.device)
    return places[ids]


def over_all(heads: MedusaHeads, logits: Tensor, vocab_size: int) -> Tensor:
    """Expand logits [..., N] of the heads' vocabulary to logits [..., V] of all tokens, -inf for other tokens."""
    if heads.vocabulary is None:
        return logits
    spread = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    spread[..., heads.vocabulary.to(logits.device)] = logits
    return spread
