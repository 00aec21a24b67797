"""Heads that guess among the most frequent tokens only (FR-Spec, arXiv 2502.14856; EAGLE-3's draft vocabulary).

Most of what an LM head of 128,000 words reads is about words that hardly ever come. Heads with a `vocabulary` of N
tokens give N logits, in the order of that list, the most frequent first; `token_ids` says which tokens they stand for.
What the list does not hold is never guessed: the backbone writes it all the same, a step later.

Shapes: V the backbone's vocabulary, N the heads', H hidden size.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.heads.independent import LMHead, MedusaHeads

ABSENT = -1


def lm_head_for(heads: MedusaHeads, backbone: Backbone) -> LMHead:
    """What stands in for the LM head of heads that share one: the backbone's, or its rows for the heads' tokens."""
    if heads.vocabulary is None or heads.lm_heads is not None:
        return backbone.lm_head
    rows = rows_for(heads, backbone.head)

    def reduced(hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., N], in the LM head's dtype as `Backbone.lm_head`."""
        return rows(hidden.to(rows.weight.dtype))

    return reduced


def rows_for(heads: MedusaHeads, lm_head: nn.Module) -> nn.Linear:
    """The rows [N, H] of an LM head [V, H] that the heads use; all of them where their vocabulary is the backbone's.

    They are copied once, and kept beside the heads for as long as it is the same LM head.
    """
    if not isinstance(lm_head, nn.Linear):
        raise TypeError(f"the backbone's LM head is a {type(lm_head).__name__}; a Linear is needed here")
    if heads.vocabulary is None:
        return lm_head
    weight, bias = lm_head.weight, lm_head.bias
    if heads.shared_rows is not None:
        of, words, rows = heads.shared_rows
        same = of() is weight and words is heads.vocabulary
        if same and (rows.weight.dtype, rows.weight.device) == (weight.dtype, weight.device):
            return rows
    ids = heads.vocabulary.to(weight.device)
    rows = nn.Linear(weight.shape[1], len(ids), bias is not None, device="meta")
    rows.weight = nn.Parameter(weight.detach()[ids], requires_grad=False)
    if bias is not None:
        rows.bias = nn.Parameter(bias.detach()[ids], requires_grad=False)
    heads.shared_rows = (weakref.ref(weight), heads.vocabulary, rows)
    return rows


def token_ids(heads: MedusaHeads, places: Tensor) -> Tensor:
    """Places [...] among the heads' logits -> the tokens [...] that they stand for."""
    return places if heads.vocabulary is None else heads.vocabulary.to(places.device)[places]


def places_of(vocabulary: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
    """Tokens [...] of a backbone with `vocab_size` of them -> their places in `vocabulary` [N], or ABSENT [...]."""
    places = torch.full((vocab_size,), ABSENT, dtype=torch.long, device=ids.device)
    places[vocabulary.to(ids.device)] = torch.arange(len(vocabulary), device=ids.device)
    return places[ids]


def over_all(heads: MedusaHeads, logits: Tensor, vocab_size: int) -> Tensor:
    """Logits [..., N] -> [..., V], with no chance for the tokens that these heads never guess."""
    if heads.vocabulary is None:
        return logits
    spread = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    spread[..., heads.vocabulary.to(logits.device)] = logits
    return spread
