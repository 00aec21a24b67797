"""Products of the weights of Markov heads and tokens, computed once for all tokens and looked up by drafts.

With x_g for the row of token g in the LM head of head k, Markov heads (`medusa.heads.markov`) add

    e(t_0) A_k                                           to the hidden state before the blocks, and
    sigmoid(h G_k + b_k) * (e(t) V_k) · (U_k x_g)        to the logit of guess g after token t.

The products with A, V and U do not depend on the text. With a large vocabulary they would fill memory and save little
beside the LM head; then each draft computes those of its candidates.

Shapes: K heads, H hidden size, R rank, V vocabulary of the backbone, N vocabulary of the heads, B texts, M tokens."""

from __future__ import annotations

import weakref
from typing import cast

import torch
from torch import Tensor, nn

from medusa.backbone import Backbone
from medusa.heads.markov import MarkovHeads
from medusa.vocabulary import rows_for

LIMIT = 1 << 24
"""Maximum of numbers that are kept for one set of heads: 64 MB in float32."""

# The rows of each set of heads in memory.
_ROWS = weakref.WeakKeyDictionary[MarkovHeads, "PathRows"]()


class PathRows(nn.Module):
    """The products of all tokens. A module, so that compiled steps know that its buffers stay where they are."""

    roots: Tensor  # [K V, H]: e(t) A_k
    before: Tensor  # [(K - 1) V, R]: e(t) V_k
    guesses: Tensor  # [(K - 1) N, R]: U_k x_g
    starts: Tensor  # [K, 1, 1] where the rows of each head start, in `roots` and `before`
    guess_starts: Tensor  # [K, 1, 1], in `guesses`

    def __init__(self, heads: MarkovHeads, backbone: Backbone) -> None:
        """Compute the products."""
        super().__init__()
        self.made_from = [(weakref.ref(weight), version(weight)) for weight in weights(heads, backbone)]
        self.vocab_size = backbone.vocab_size
        head = torch.arange(heads.config.num_heads, device=heads.device)[:, None, None]
        self.register_buffer("starts", head * backbone.vocab_size)
        self.register_buffer("guess_starts", head * heads.config.draft_vocab_size(backbone.vocab_size))
        for name, rows in products(heads, backbone).items():
            with torch.inference_mode(False):  # a buffer made in inference mode could not be refreshed outside of it
                self.register_buffer(name, torch.empty_like(rows))
            self.get_buffer(name).copy_(rows)

    @staticmethod
    def of(heads: MarkovHeads, backbone: Backbone) -> PathRows | None:
        """Return the products for these heads and all tokens, or `None` if they would be too many."""
        (later, rank, size), tokens = heads.out.shape, backbone.vocab_size
        numbers = (later + 1) * tokens * size + later * rank * (tokens + heads.config.draft_vocab_size(tokens))
        if numbers > LIMIT:
            return None
        kept, needed = _ROWS.get(heads), weights(heads, backbone)
        if kept is None or not kept.holds_for(needed):
            kept = _ROWS[heads] = PathRows(heads, backbone)
        kept.refresh(heads, backbone)
        return kept

    def holds_for(self, weights: list[Tensor]) -> bool:
        """Whether the products were computed from these tensors, with the device and the dtype that they have now."""
        same = all(made() is weight for (made, _), weight in zip(self.made_from, weights, strict=True))
        return same and (self.roots.device, self.roots.dtype) == (weights[0].device, weights[0].dtype)

    def refresh(self, heads: MarkovHeads, backbone: Backbone) -> None:
        """Compute the products again, at the same addresses, if a weight has changed since the last time."""
        versions = [version(made()) for made, _ in self.made_from]
        if versions == [known for _, known in self.made_from]:
            return
        for name, rows in products(heads, backbone).items():
            self.get_buffer(name).copy_(rows)
        self.made_from = [(made, number) for (made, _), number in zip(self.made_from, versions, strict=True)]

    def known(self, root: Tensor, depth: int) -> Tensor:
        """Look up what the first `depth` heads know of the roots [B], [depth, B, H]."""
        return torch.embedding(self.roots, root.to(self.roots.device) + self.starts[:depth, 0])

    def values(self, tokens: Tensor, heads: slice) -> Tensor:
        """Look up the rows e(t) V of tokens [k, B, W] before a guess, [k, B, W, R], for k of the heads after head 0."""
        return torch.embedding(self.before, tokens + self.starts[heads])

    def guess_rows(self, places: Tensor) -> Tensor:
        """Look up the rows U x_g of guesses [k, B, M], [k, B, M, R], for the first k heads after head 0.

        `places` are indices in the heads' vocabulary."""
        return torch.embedding(self.guesses, places + self.guess_starts[: len(places)])


@torch.no_grad()
def products(heads: MarkovHeads, backbone: Backbone) -> dict[str, Tensor]:
    """Compute the three products of all tokens."""
    embedded = heads.embed(torch.arange(backbone.vocab_size, device=backbone.device), backbone.embed)
    *_, lm_head = weights(heads, backbone)
    columns = lm_head.T if heads.lm_heads is None else lm_head[1:]
    return {
        "roots": heads.known(embedded, slice(None)).flatten(0, 1),
        "before": heads.values(embedded.expand(len(heads.token), -1, -1), slice(None)).flatten(0, 1),
        "guesses": (heads.out @ columns.to(heads.out)).transpose(1, 2).flatten(0, 1),
    }


def weights(heads: MarkovHeads, backbone: Backbone) -> list[Tensor]:
    """The weights from which the products are computed; the LM heads' come last."""
    lm_head = rows_for(heads, backbone.head).weight if heads.lm_heads is None else heads.lm_heads
    embedding = cast("Tensor", backbone.model.get_input_embeddings().weight)
    return [heads.root, heads.token, heads.out, embedding, lm_head]


def version(weight: Tensor | None) -> int:
    """How often `weight` has been written to; 0 if it is no more, or was made in inference mode, which counts nothing.

    A change that is not counted makes drafts worse until the next that is, but no text wrong."""
    try:
        return 0 if weight is None else weight._version
    except RuntimeError:
        return 0
