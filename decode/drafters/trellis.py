"""Drafts with Markov heads: one pass of all heads and one table for each pair of neighbouring heads, then look-ups.

The heads' independent parts, which know the root, give the candidates of each head, its M most probable tokens. The
first head has no other part. All further paths lead from a candidate of one head to a candidate of the next. So K - 1
tables [M, M] of logits describe them (a trellis, as in Viterbi decoding), which one batched product computes:

                 root ── C_1 ══ C_2 ══ C_3        ══ a table of M x M logits

The LM head is read once, whatever the tree. `PathDrafter` drafts with the same heads without shortlists, and is the
oracle.

Shapes: B texts, K heads (as many as the tree is deep), M candidates of a head, W nodes, H hidden size, R the rank of
the path term, V the heads' vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from decode.draft import Frontier
from decode.drafters.heads import UsesHeads
from decode.drafters.layouts import DynamicTree, Layout, shortlist_of
from decode.drafters.levelwise import Guesses, LevelwiseDrafter, State
from decode.ops.fast_topk import TopK, top_k
from decode.target import Target
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.markov import MarkovHeads
from medusa.vocabulary import rows_of, token_ids


class Trellis(NamedTuple):
    """The logits of all paths over M candidates of each of K heads, in B texts."""

    ids: Tensor  # [K, B, M] the token ids of the candidates
    first: Tensor  # [B, 1, M] of the candidates of the first head
    tables: Tensor  # [K - 1, B, M, M] of each head's candidates (last) after each candidate of the head before it
    held: Tensor | None  # [K, B, 1, 1] the log probability of each head's candidates together, for dynamic trees

    def children(self, depth: int, tokens: Tensor) -> Guesses:
        """Look up what follows W nodes at `depth` in each text: their tokens [B, W] are candidates of that depth."""
        logits = self.first
        if depth:
            same = self.ids[depth - 1][:, None] == tokens[:, :, None].to(self.ids.device)  # [B, W, M]
            place = same.int().argmax(-1, keepdim=True)
            logits = self.tables[depth - 1].gather(1, place.expand_as(same))
        return Guesses(logits, self, self.ids[depth], None if self.held is None else self.held[depth])


class TrellisDrafter(UsesHeads, LevelwiseDrafter):
    """Drafts trees over the candidates of Markov heads: `tree.candidates.shortlist` for each head."""

    heads: MarkovHeads

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        UsesHeads.__init__(self, heads, backbone, tree, target)
        LevelwiseDrafter.__init__(self, self.tree, backbone.vocab_size, target)
        wanted = max(shortlist_of(tree), tree.candidates.max_rank + 1)
        self.shortlist = min(wanted, heads.config.draft_vocab_size(backbone.vocab_size))  # M

    def begin(self, frontier: Frontier) -> Trellis:
        """Choose the candidates by the heads' independent parts, and compute their tables."""
        logits, known = self.alone(frontier)
        best, held = top_k(logits, self.shortlist), None
        if isinstance(self.tree, DynamicTree):
            # The candidates hold the same probability after every token. Two other rules accepted less (docs/log.md).
            confidences = self.tree.log_confidences(logits).gather(-1, best.indices)
            held = confidences.exp().sum(-1).log()[..., None, None]  # `logsumexp` starts four times as much
        ids = token_ids(self.heads, best.indices)
        return Trellis(ids, self.first(known, ids, best)[:, None], self.tables(known, ids, best), held)

    def alone(self, frontier: Frontier) -> tuple[Tensor, Any]:
        """Compute the logits [K, B, V] of the heads' independent parts, and what the edges read, here h [B, H]."""
        hidden, heads = self.hidden(frontier), slice(self.tree.max_depth)
        features = self.heads.independent(hidden, self.heads.known(self.embed(frontier.root), heads), heads)
        return self.heads.logits(features, self.lm_head), hidden

    def step(self, depth: int, state: State, parent: Tensor, tokens: Tensor, context_kv: ContextKV | None) -> Guesses:
        trellis: Trellis = state
        return trellis.children(depth, tokens)

    def first(self, known: Any, ids: Tensor, best: TopK) -> Tensor:
        """Compute the logits [B, M] of the first head's candidates, which know the root; arguments as of `tables`."""
        return best.values[0]

    def tables(self, known: Any, ids: Tensor, best: TopK) -> Tensor:
        """Compute the logits [K - 1, B, M, M] of each head's candidates after each candidate of the head before it.

        `known` comes from `alone`, and `ids` are the candidates' token ids [K, B, M]. `best` has their logits without
        path terms, and their indices in the heads' vocabulary."""
        texts = ids.shape[1]
        codes, guesses = self.edges(known, ids, best.indices)
        alone, columns = best.values.flatten(0, 1)[texts:, None], guesses.transpose(1, 2)
        if alone.dtype != codes.dtype:  # the heads and a shared LM head can have different ones
            dtype = torch.promote_types(alone.dtype, codes.dtype)
            alone, codes, columns = alone.to(dtype), codes.to(dtype), columns.to(dtype)
        return torch.baddbmm(alone, codes, columns).unflatten(0, (-1, texts))

    def edges(self, known: Any, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Compute rows of candidates before a guess and as guesses, both [(K - 1) B, M, R].

        The product of two rows is what the token before adds to the guess's logit. `ids` and `places`: [K, B, M]."""
        values, guesses = self.path_rows(ids, places)
        return self.heads.gates(known, slice(len(ids) - 1)).flatten(0, 1)[:, None] * values, guesses

    def path_rows(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of candidates before a guess and as guesses, both [(K - 1) B, M, R].

        The product of two such rows with a gate between them is a path term. `ids` and `places`: [K, B, M]."""
        heads, before, places, later = self.heads, ids[:-1], places[1:], slice(ids.shape[0] - 1)
        embedded = self.embed(before)
        values = heads.values(embedded.flatten(1, 2), later).unflatten(1, before.shape[1:])
        if heads.lm_heads is None:
            columns = rows_of(self.backbone.head_weight, ids[1:]).to(values.dtype).transpose(2, 3)
        else:
            at = places[:, :, None].expand(-1, -1, embedded.shape[-1], -1)
            columns = heads.lm_heads[1 : len(places) + 1, None].expand(-1, places.shape[1], -1, -1).gather(3, at)
        guesses = (heads.out[later, None] @ columns).transpose(2, 3)  # columns: [K - 1, B, H, M]
        return values.flatten(0, 1), guesses.flatten(0, 1)
