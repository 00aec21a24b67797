"""Reduced vocabularies: heads that guess among the most frequent tokens only (FR-Spec, arXiv 2502.14856; EAGLE-3).

A modern LM head has about 128,000 rows, and most of the tokens are rare. Heads with a `vocabulary` of N tokens compute
only N logits. Index i of these logits belongs to token `vocabulary[i]`, the most frequent token first. Heads cannot
guess tokens outside the vocabulary, but the backbone can still generate them.

Shapes: V the backbone's vocabulary size, N the heads' vocabulary size, H hidden size, ... any positions."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import LMHead, MedusaHeads

ABSENT = -1  # the index that `places_of` returns for a token outside the heads' vocabulary


def lm_head_for(heads: MedusaHeads, backbone: Backbone) -> LMHead:
    """Return the function from features [..., H] to logits [..., V] for heads that share the backbone's LM head.

    H is the hidden size, V the vocabulary size. For heads with a reduced vocabulary of N tokens, V becomes N, and the
    function has its own copy of the LM head's rows (`SelectedRows`)."""
    if heads.vocabulary is None or heads.lm_heads is not None:
        return backbone.lm_head
    return SelectedRows(heads, backbone.head)


def require_embeddings(heads: MedusaHeads, backbone: Backbone) -> None:
    """Raise RequestError if heads read rows of the backbone's embedding table, and the backbone does more with them."""
    if heads.reads_raw_embeddings and backbone.scales_embeddings:
        scales = f"{type(backbone.model).__name__} scales its embeddings, and these heads read them without"
        raise RequestError(f"{scales}; take heads with embeddings of their own, or another kind")


class SelectedRows:
    """The rows of an LM head for heads with a reduced vocabulary, as the weights are when they are copied.

    PyTorch does not count all changes of a weight (`weight.data += delta`, with which peft merges adapters, is not
    counted). So rows are copied for each text, and are not kept for later ones."""

    def __init__(self, heads: MedusaHeads, lm_head: nn.Module) -> None:
        self.heads, self.lm_head, self.rows = heads, lm_head, rows_for(heads, lm_head)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., N] of hidden states [..., H]."""
        return self.rows(hidden.to(self.rows.weight.dtype))

    def refresh(self) -> None:
        """Copy the rows again, to the same place in memory, because compiled steps read them there."""
        with torch.no_grad():
            for own, now in zip(self.rows.parameters(), rows_for(self.heads, self.lm_head).parameters(), strict=True):
                own.copy_(now)


def rows_for(heads: MedusaHeads, lm_head: nn.Module) -> nn.Linear:
    """Return the LM head [V, H] or, for heads with a reduced vocabulary, a copy of the rows [N, H] of its N tokens."""
    if not isinstance(lm_head, nn.Linear):
        raise TypeError(f"the backbone's LM head is a {type(lm_head).__name__}; a Linear is needed here")
    if heads.vocabulary is None:
        return lm_head
    ids = heads.vocabulary.to(lm_head.weight.device)
    rows = nn.Linear(lm_head.in_features, len(ids), lm_head.bias is not None, device="meta")
    with torch.inference_mode(False):  # rows made in inference mode could not be refreshed outside of it
        for name, parameter in lm_head.named_parameters():
            setattr(rows, name, nn.Parameter(rows_of(parameter.detach(), ids), requires_grad=False))
    return rows


def rows_of(weight: Tensor, ids: Tensor) -> Tensor:
    """Return the rows [..., H] or [...] of an LM head's weight or bias for token ids [...], also if it is sharded.

    Under tensor parallelism each process holds some of the rows. All processes must ask for the same ones."""
    if not isinstance(weight, DTensor):
        return weight[ids]
    of_all = DTensor.from_local(ids, weight.device_mesh, [Replicate()], run_check=False)
    table = weight if weight.dim() == 2 else weight[:, None]
    found = cast("DTensor", F.embedding(of_all, table)).full_tensor()
    return found if weight.dim() == 2 else found[..., 0]


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
