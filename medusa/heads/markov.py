"""Markov heads: head k reads the hidden state and the one token before its guess.

Let h be the backbone's hidden state, and e(t) the embedding of a token, scaled to root mean square 1. Head k, from 0,
computes the features

    x_k = blocks_k(h) + path_k(h, t_k)     with path_k(h, t) = (sigmoid(h G_k + b_k) * e(t) V_k) U_k

where t_k is the token before the guess; t_0 is the root. V_k and G_k map H numbers to R, and U_k maps R to H. The first
term is that of independent heads; a low rank R makes the second one cheap. Given h, a path is a Markov chain. So tables
of all pairs of candidates describe all paths, and a tree grows by look-ups (`decode.drafters.trellis`).

The candidates come from the first term alone. It learns to rank tokens without the second one, because training leaves
that one out at random positions (`path_dropout`).

Shapes: K heads, of which k run, P positions, H hidden size, R rank, `...` any positions or nodes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.sequential import SequentialHeads, State, normalised


class MarkovHeads(SequentialHeads):
    """Heads that read the token before their guess. Their state is the hidden states [..., H], for all heads."""

    follows_path = True

    def make_blocks(self) -> None:
        MedusaHeads.make_blocks(self)  # of all heads together, because these blocks do not depend on the path
        heads, size, rank = self.config.num_heads, self.config.hidden_size, self.config.rank or 1
        self.path_dropout = 0.0  # share of the positions at which training leaves the path term out, for each head
        self.token = nn.Parameter(torch.empty(heads, size, rank))  # V
        self.gate = nn.Parameter(torch.zeros(heads, size, rank))  # G
        self.gate_bias = nn.Parameter(torch.zeros(heads, 1, rank))  # b
        self.out = nn.Parameter(torch.zeros(heads, rank, size))  # U
        nn.init.uniform_(self.token, -(size**-0.5), size**-0.5)

    def gates(self, hidden: Tensor, heads: slice) -> Tensor:
        """Compute the gates [k, P, R] of k heads from hidden states [P, H]."""
        weight = self.gate[heads]
        return torch.baddbmm(self.gate_bias[heads], hidden.expand(len(weight), -1, -1), weight).sigmoid()

    def codes(self, gates: Tensor, token: Tensor, heads: slice) -> Tensor:
        """Compute the path terms of k heads before U maps them to features, [k, P, M, R].

        `gates` are [k, P, R], and `token` [k, P, M, H] the embeddings of M tokens after each of the P positions."""
        values = torch.bmm(normalised(token).flatten(1, 2), self.token[heads])
        return gates[:, :, None] * values.unflatten(1, token.shape[1:3])

    def path_terms(self, hidden: Tensor, token: Tensor, heads: slice) -> Tensor:
        """Compute the path terms [k, ..., H] of k heads from hidden states [..., H] and embeddings [k, ..., H]."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        codes = self.codes(self.gates(flat, heads), token.reshape(len(token), len(flat), 1, -1), heads)[:, :, 0]
        return torch.bmm(codes, self.out[heads]).view(token.shape)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        following, heads = self.require_following(inputs), slice(num_heads)
        terms = self.path_terms(inputs.hidden, following.movedim(-2, 0)[heads], heads)
        if self.training and self.path_dropout:
            terms = terms * (torch.rand(terms.shape[:-1], device=terms.device) >= self.path_dropout)[..., None]
        return MedusaHeads.features(self, inputs, num_heads) + terms

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        (hidden,), one = state, slice(head, head + 1)
        return (self.run_blocks(hidden, one) + self.path_terms(hidden, token[None], one))[0], state
