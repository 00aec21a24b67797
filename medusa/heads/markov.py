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

import torch
from torch import Tensor, nn

from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.heads.sequential import SequentialHeads, State, normalised


class MarkovHeads(SequentialHeads):
    """Heads that read the root and the token before their guess. Their state holds h and e(t_0), for all heads."""

    follows_path = True

    def make_blocks(self) -> None:
        MedusaHeads.make_blocks(self)  # of all heads together, because these blocks do not depend on the path
        heads, size, rank = self.config.num_heads, self.config.hidden_size, self.config.rank or 1
        self.path_dropout = 0.0  # share of the positions at which training leaves the path term out, for each head
        self.root = nn.Parameter(torch.zeros(heads, size, size))  # A
        later = heads - 1  # the first of these parameters' K - 1 entries belongs to head 1
        self.token = nn.Parameter(torch.empty(later, size, rank))  # V
        self.gate = nn.Parameter(torch.zeros(later, size, rank))  # G
        self.gate_bias = nn.Parameter(torch.zeros(later, 1, rank))  # b
        self.out = nn.Parameter(torch.zeros(later, rank, size))  # U
        nn.init.uniform_(self.token, -(size**-0.5), size**-0.5)

    def independent(self, hidden: Tensor, root: Tensor, heads: slice) -> Tensor:
        """Compute the features [k, ..., H] of k heads without path terms, from states and embeddings [..., H]."""
        flat, weight = hidden.reshape(-1, hidden.shape[-1]), self.root[heads]
        known = normalised(root).reshape(flat.shape)
        # A sum of its own, because under autocast a baddbmm would round the hidden state to bfloat16.
        x_KMH = flat + torch.bmm(known.expand(len(weight), -1, -1), weight)
        for block in self.blocks:
            x_KMH = block(x_KMH, heads)
        return x_KMH.view(-1, *hidden.shape)

    def codes(self, hidden: Tensor, token: Tensor, later: slice) -> Tensor:
        """Compute the path terms of k heads before U maps them to features, [k, P, M, R].

        `hidden` [P, H] are hidden states, and `token` [k, P, M, H] the embeddings of M tokens after each of them.
        `later` selects the heads among those after head 0."""
        gate = torch.baddbmm(self.gate_bias[later], hidden.expand(len(token), -1, -1), self.gate[later]).sigmoid()
        values = torch.bmm(normalised(token).flatten(1, 2), self.token[later])
        return gate[:, :, None] * values.unflatten(1, token.shape[1:3])

    def path_terms(self, hidden: Tensor, token: Tensor, later: slice) -> Tensor:
        """Compute the path terms [k, ..., H] of k heads after head 0 from states [..., H] and embeddings [k, ..., H].

        `later` selects the heads among those after head 0."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        codes = self.codes(flat, token.reshape(-1, *flat.shape)[:, :, None], later)[:, :, 0]
        return torch.bmm(codes, self.out[later]).view(token.shape)

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        following = self.require_following(inputs).movedim(-2, 0)[:num_heads]
        alone = self.independent(inputs.hidden, following[0], slice(num_heads))
        terms = self.path_terms(inputs.hidden, following[1:], slice(len(following) - 1))
        if self.training and self.path_dropout:
            terms = terms * (torch.rand(terms.shape[:-1], device=terms.device) >= self.path_dropout)[..., None]
        return torch.cat([alone[:1], alone[1:] + terms])

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        if head == 0:
            state = (*state, token)
        hidden, root = state
        feature = self.independent(hidden, root, slice(head, head + 1))[0]
        if head:
            feature = feature + self.path_terms(hidden, token[None], slice(head - 1, head))[0]
        return feature, state
