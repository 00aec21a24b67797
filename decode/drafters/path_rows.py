"""Products of the weights of Markov heads and tokens, computed once for all tokens and looked up by drafts.

With x_g for the row of token g in the LM head of head k, Markov heads (`medusa.heads.markov`) add

    e(t_0) A_k                                           to the hidden state before the blocks, and
    sigmoid(h G_k + b_k) * (e(t) V_k) · (U_k x_g)        to the logit of guess g after token t.

The products with A, V and U do not depend on the text. With a large vocabulary they would fill memory and save little
beside the LM head; then each draft computes those of its candidates. A candidate of head k is a guess of this head and
the token before a guess of head k + 1, so both of its rows lie side by side and are read at once.

Shapes: K heads, H hidden size, R rank, V vocabulary of the backbone, N vocabulary of the heads, B texts, M tokens."""

from __future__ import annotations

import weakref
from operator import is_
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

    roots: Tensor  # [V, K, H]: e(t) A_k
    paths: Tensor  # [K N, 2 R]: U_k x_t (zeros for head 0) and e(t) V_{k + 1} (zeros for the last head)
    starts: Tensor  # [K, 1, 1] where the rows of each head start in `paths`

    def __init__(self, heads: MarkovHeads, backbone: Backbone) -> None:
        """Compute the products."""
        super().__init__()
        needed = weights(heads, backbone)
        self.made_from = [weakref.ref(weight) for weight in needed]
        # PyTorch counts no changes of a weight that was made in inference mode. A change that is not counted makes
        # drafts worse until the next that is, but no text wrong.
        self.counted = [weakref.ref(weight) for weight in needed if not weight.is_inference()]
        self.versions = self.current_versions()
        head = torch.arange(heads.config.num_heads, device=heads.device)[:, None, None]
        self.register_buffer("starts", head * heads.config.draft_vocab_size(backbone.vocab_size))
        for name, rows in products(heads, backbone).items():
            with torch.inference_mode(False):  # a buffer made in inference mode could not be refreshed outside of it
                self.register_buffer(name, torch.empty_like(rows))
            self.get_buffer(name).copy_(rows)

    @staticmethod
    def of(heads: MarkovHeads, backbone: Backbone) -> PathRows | None:
        """Return the products for these heads and all tokens, or `None` if they would be too many."""
        (later, rank, size), tokens = heads.out.shape, backbone.vocab_size
        numbers = (later + 1) * (tokens * size + heads.config.draft_vocab_size(tokens) * 2 * rank)
        if numbers > LIMIT:
            return None
        kept, needed = _ROWS.get(heads), weights(heads, backbone)
        if kept is None or not kept.holds_for(needed):
            kept = _ROWS[heads] = PathRows(heads, backbone)
        kept.refresh(heads, backbone)
        return kept

    def holds_for(self, weights: list[Tensor]) -> bool:
        """Whether the products were computed from these tensors, with the device and the dtype that they have now."""
        same = len(self.made_from) == len(weights) and all(map(is_, [made() for made in self.made_from], weights))
        return same and (self.roots.device, self.roots.dtype) == (weights[0].device, weights[0].dtype)

    def refresh(self, heads: MarkovHeads, backbone: Backbone) -> None:
        """Compute the products again, at the same addresses, if a weight has changed since the last time."""
        versions = self.current_versions()
        if versions == self.versions:
            return
        for name, rows in products(heads, backbone).items():
            self.get_buffer(name).copy_(rows)
        self.versions = versions

    def current_versions(self) -> list[int]:
        """How often each counted weight has been written to; 0 for one that is no more."""
        return [getattr(made(), "_version", 0) for made in self.counted]

    def known(self, root: Tensor, depth: int) -> Tensor:
        """Look up what the first `depth` heads know of the roots [B], [depth, B, H]."""
        return self.roots.index_select(0, root.to(self.roots.device)).transpose(0, 1)[:depth]

    def path_rows(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Look up the rows of the candidates of the first k heads, indices [k, B, M] in the heads' vocabulary.

        Returns [(k - 1) B, M, R] twice: those of the first k - 1 heads as tokens before a guess, and those of the heads
        after head 0 as guesses."""
        rows = torch.embedding(self.paths, places + self.starts[: places.shape[0]]).flatten(0, 1)
        texts, rank = places.shape[1], rows.shape[-1] // 2
        return rows[:-texts, :, rank:], rows[texts:, :, :rank]


@torch.no_grad()
def products(heads: MarkovHeads, backbone: Backbone) -> dict[str, Tensor]:
    """Compute the three products of all tokens."""
    embedded = heads.embed(torch.arange(backbone.vocab_size, device=backbone.device), backbone.embed)
    listed = embedded if heads.vocabulary is None else embedded[heads.vocabulary.to(embedded.device)]
    lm_head = lm_head_weight(heads, backbone)
    columns = lm_head.T if heads.lm_heads is None else lm_head[1:]
    guesses = (heads.out @ columns.to(heads.out)).transpose(1, 2)  # [K - 1, N, R]
    before = heads.values(listed.expand(len(heads.token), -1, -1), slice(None))  # [K - 1, N, R]
    none = guesses.new_zeros(1, *guesses.shape[1:])
    return {
        "roots": heads.known(embedded, slice(None)).transpose(0, 1).contiguous(),
        "paths": torch.cat([torch.cat([none, guesses]), torch.cat([before, none])], dim=-1).flatten(0, 1),
    }


def lm_head_weight(heads: MarkovHeads, backbone: Backbone) -> Tensor:
    """The weight [N, H] of the backbone's LM head for the heads' vocabulary, or those of own LM heads [K, H, N]."""
    return rows_for(heads, backbone.head).weight if heads.lm_heads is None else heads.lm_heads


def weights(heads: MarkovHeads, backbone: Backbone) -> list[Tensor]:
    """The tensors from which the products are computed."""
    embedding = cast("Tensor", backbone.model.get_input_embeddings().weight)
    lm_head = backbone.head_weight if heads.lm_heads is None else heads.lm_heads
    found = [heads.root, heads.token, heads.out, embedding, lm_head]
    return found if heads.vocabulary is None else [*found, heads.vocabulary]
