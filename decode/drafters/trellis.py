"""Drafts with Markov heads: one pass of all heads and one table for each pair of neighbouring heads, then look-ups.

The heads' independent parts, which know the root, give the candidates of each head, its M most probable tokens. The
first head has no other part. All further paths lead from a candidate of one head to a candidate of the next. So K - 1
tables [M, M] of logits describe them (a trellis, as in Viterbi decoding), which one batched product computes:

                 root ── C_1 ══ C_2 ══ C_3        ══ a table of M x M logits

The rest is `LevelwiseDrafter` with a step that looks up a row. The LM head is read once, whatever the tree.
`PathDrafter` drafts with the same heads without shortlists, and is the oracle.

Shapes: B texts, K heads (as many as the tree is deep), M candidates of a head, W nodes, H hidden size, R the rank of
the path term, V the heads' vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Frontier
from decode.drafters.layouts import DynamicTree, Layout
from decode.drafters.levelwise import Guesses, PathDrafter
from decode.ops.fast_topk import top_k
from decode.target import Target
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.markov import MarkovHeads
from medusa.heads.sequential import State
from medusa.vocabulary import rows_for, token_ids


class Trellis(NamedTuple):
    """The scores of all paths over the candidates of K heads, in B texts: logits, or for dynamic trees confidences."""

    ids: Tensor  # [K, B, M] the token ids of the candidates
    first: Tensor  # [B, 1, M] of the candidates of the first head
    tables: Tensor  # [K - 1, B, M, M] of each head's candidates (last) after each candidate of the head before it


class TrellisDrafter(PathDrafter):
    """Drafts trees over the candidates of Markov heads: `tree.candidates.shortlist` for each head."""

    heads: MarkovHeads

    def __init__(self, heads: MarkovHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Make a drafter that fills `tree`; raises a `RequestError` if heads, backbone and tree do not match."""
        super().__init__(heads, backbone, tree, target)
        static = self.tree.candidates
        wanted = max(static.shortlist, static.max_rank + 1)
        self.shortlist = min(wanted, heads.config.draft_vocab_size(backbone.vocab_size))  # M

    def begin(self, frontier: Frontier) -> Trellis:
        heads = self.heads
        hidden = frontier.hidden.to(heads.device, self.dtype)
        root = heads.embed(frontier.root, self.backbone.embed)
        logits = heads.logits(heads.independent(hidden, root, slice(self.tree.max_depth)), self.lm_head)  # [K, B, V]
        best = top_k(logits, self.shortlist)
        ids = token_ids(heads, best.indices)
        tables = best.values[1:, :, None] + self.path_logits(hidden, ids[:-1], best.indices[1:]).to(best.values)
        first = best.values[0, :, None]
        if isinstance(self.tree, DynamicTree):
            first, tables = confident(self.tree, logits, best.indices, tables)
        there = frontier.root.device
        return Trellis(ids.to(there), first.to(there), tables.to(there))

    def path_logits(self, hidden: Tensor, before: Tensor, places: Tensor) -> Tensor:
        """Compute what the path terms add to logits, [K - 1, B, M, M], for pairs of candidates of neighbouring heads.

        `before` [K - 1, B, M] are token ids, and `places` [K - 1, B, M] indices in the vocabulary of the next head."""
        heads, later = self.heads, slice(len(before))
        codes = heads.codes(hidden, heads.embed(before, self.backbone.embed), later)  # [K - 1, B, M, R]
        if heads.lm_heads is None:
            rows = rows_for(heads, self.backbone.head).weight[places].to(codes.dtype).transpose(2, 3)
        else:
            at = places[:, :, None].expand(-1, -1, hidden.shape[-1], -1)
            rows = heads.lm_heads[1 : len(places) + 1, None].expand(-1, places.shape[1], -1, -1).gather(3, at)
        return codes @ (heads.out[later, None] @ rows)  # rows: [K - 1, B, H, M]

    def step(self, depth: int, state: State, parent: Tensor, tokens: Tensor, context_kv: ContextKV | None) -> Guesses:
        """Look up the rows of nodes in a table. Except in draws, `tokens` are indices of candidates (see `named`)."""
        ids, first, tables = state
        if depth == 0:
            return Guesses(first, state, None if self.target is None else ids[0])
        if self.target is None:
            return Guesses(tables[depth - 1].gather(1, tokens[:, :, None].expand(-1, -1, tables.shape[-1])), state)
        same = ids[depth - 1][:, None] == tokens[:, :, None]  # [B, W, M]
        found = same.int().argmax(-1, keepdim=True)
        return Guesses(tables[depth - 1].gather(1, found.expand(-1, -1, tables.shape[-1])), state, ids[depth])

    def named(self, state: State, ids: Tensor, depth: Tensor) -> Tensor:
        candidates = state[0]  # [K, B, M]
        place = torch.add(ids[:, 1:], depth[:, 1:] - 1, alpha=candidates.shape[-1])
        return torch.cat([ids[:, :1], candidates.transpose(0, 1).flatten(1).gather(1, place)], dim=1)

    def log_confidences(self, tree: DynamicTree, logits: Tensor, depth: int) -> Tensor:
        return logits  # they are confidences already (`confident`)


def confident(tree: DynamicTree, logits: Tensor, places: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Convert the scores of a trellis to log probabilities at the temperatures of `tree`: `first` and `tables`.

    `logits` [K, B, V] are those of the independent parts, `places` [K, B, M] the candidates in them. The candidates of
    a head hold the same probability after every token: all that they hold in `logits`. Two other rules accepted less
    (docs/log.md)."""
    alone = tree.log_confidences(logits).gather(-1, places)
    held = alone[1:].logsumexp(-1)[..., None, None]  # [K - 1, B, 1, 1]
    return alone[0, :, None], tree.scaled(tables, first=1).log_softmax(-1) + held
