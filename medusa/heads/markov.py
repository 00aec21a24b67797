"""Markov heads: head k reads the hidden state, the root and the one token before its guess.

Let h be the backbone's hidden state, and e(t) the embedding of a token, scaled to root mean square 1. Token t_0 is the
root, and t_k the one before the guess of head k, counted from 0. Head k computes the features

    x_k = blocks_k(h + e(t_0) A_k) + path_k(h, t_k)     with path_k(h, t) = (sigmoid(h G_k + b_k) * e(t) V_k) U_k

A_k maps H numbers to H, V_k and G_k map H to R, and U_k maps R to H. The first term is that of independent heads which
know the root, as every draft does. Head 0 has no other term. A low rank R makes the second term cheap. Given h and the
root, a path is a Markov chain. So tables of all pairs of candidates describe all paths, and a tree grows by look-ups
(`decode.drafters.trellis`).

The candidates come from the first term alone. It learns to rank tokens without the second one, because training leaves
that one out at random positions (`path_dropout`).

Shapes: K heads, of which k run, P positions, H hidden size, R rank, `...` any positions or nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from medusa.config import KindSettings, MedusaConfig, require_whole
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.kind import TRELLIS
from medusa.heads.sequential import SequentialHeads, State, normalised
from medusa.heads.stacked import product


def usual_rank(hidden_size: int) -> int:
    """Return the default rank of what guesses read of the token before them."""
    return min((hidden_size + 1) // 2, 256)


@dataclass
class MarkovSettings(KindSettings):
    """The settings of heads of kind `markov`."""

    rank: Annotated[int | None, Ge(1)] = None
    """Rank of the term for the token before, in heads of kind markov; by default half the hidden size, up to 256."""


class MarkovHeads(SequentialHeads):
    """Heads that read the root and the token before their guess. Their state holds h and e(t_0), for all heads."""

    Settings = MarkovSettings
    follows_path = True
    stacked_weights = ("lm_heads", "root", "token", "gate")
    usual_path_dropout = 0.4  # measured on stories260K (docs/log.md)

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        settings = MarkovSettings.of(config)
        if settings.rank is None:
            settings.rank = usual_rank(config.hidden_size)
        require_whole("rank", settings.rank, 1)

    @classmethod
    def module_counts(cls, config: MedusaConfig) -> dict[str, int]:
        return MedusaHeads.module_counts(config)  # its blocks hold the tensors of all heads

    @classmethod
    def drafts_by(cls, config: MedusaConfig) -> str:
        return TRELLIS

    def make_blocks(self) -> None:
        MedusaHeads.make_blocks(self)  # of all heads together, because these blocks do not depend on the path
        heads, size, rank = self.config.num_heads, self.config.hidden_size, MarkovSettings.of(self.config).rank
        assert rank is not None, "the check of the config chooses it"
        self.path_dropout = 0.0  # share of the positions at which training leaves the path term out, for each head
        self.root = nn.Parameter(torch.zeros(heads, size, size))  # A
        later = heads - 1  # the first of these parameters' K - 1 entries belongs to head 1
        self.token = nn.Parameter(torch.empty(later, size, rank))  # V
        self.gate = nn.Parameter(torch.zeros(later, size, rank))  # G
        self.gate_bias = nn.Parameter(torch.zeros(later, 1, rank))  # b
        self.out = nn.Parameter(torch.zeros(later, rank, size))  # U
        nn.init.uniform_(self.token, -(size**-0.5), size**-0.5)

    def known(self, root: Tensor, heads: slice) -> Tensor:
        """Compute what k heads know of the root, e(t_0) A_k [k, P, H], from the embeddings [P, H] of roots."""
        count = len(range(self.config.num_heads)[heads])
        return product(normalised(root).expand(count, -1, -1), self.root, heads)

    def independent(self, hidden: Tensor, known: Tensor, heads: slice) -> Tensor:
        """Compute the features [k, P, H] of k heads without path terms, from hidden states [P, H] and `known`."""
        # A sum of its own, because under autocast a baddbmm would round the hidden state to bfloat16.
        x_KMH = hidden + known
        for block in self.blocks:
            x_KMH = block(x_KMH, heads)
        return x_KMH

    def alone(self, hidden: Tensor, root: Tensor, heads: slice) -> Tensor:
        """Compute `independent` features [k, ..., H] from hidden states and embeddings of roots [..., H]."""
        known = self.known(root.reshape(-1, root.shape[-1]), heads)
        flat = self.independent(hidden.reshape(-1, hidden.shape[-1]), known, heads)
        return flat.view(-1, *hidden.shape)

    def gates(self, hidden: Tensor, later: slice = slice(None)) -> Tensor:
        """Compute the gates [k, P, R] of the path terms of k heads after hidden states [P, H].

        `later` selects the heads among those after head 0, here and below."""
        count = len(range(len(self.gate))[later])
        return product(hidden.expand(count, -1, -1), self.gate, later, self.gate_bias).sigmoid()

    def values(self, token: Tensor, later: slice) -> Tensor:
        """Compute what the gates of k heads let through, [k, M, R], for the embeddings [k, M, H] of tokens."""
        return product(normalised(token), self.token, later)

    def path_terms(self, hidden: Tensor, token: Tensor, later: slice) -> Tensor:
        """Compute the path terms [k, ..., H] of k heads from hidden states [..., H] and embeddings [k, ..., H]."""
        flat = token.flatten(1, -2)
        codes = self.gates(hidden.reshape(-1, hidden.shape[-1]), later) * self.values(flat, later)
        return torch.bmm(codes, self.out[later]).view(token.shape)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        following = self.require_following(inputs).movedim(-2, 0)[:num_heads]
        alone = self.alone(inputs.hidden, following[0], slice(num_heads))
        terms = self.path_terms(inputs.hidden, following[1:], slice(len(following) - 1))
        if self.training and self.path_dropout:
            terms = terms * (torch.rand(terms.shape[:-1], device=terms.device) >= self.path_dropout)[..., None]
        return torch.cat([alone[:1], alone[1:] + terms])

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        if head == 0:
            state = (*state, token)
        hidden, root = state
        feature = self.alone(hidden, root, slice(head, head + 1))[0]
        if head:
            feature = feature + self.path_terms(hidden, token[None], slice(head - 1, head))[0]
        return feature, state
