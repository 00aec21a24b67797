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

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft, Frontier
from decode.drafters.layouts import DynamicTree, Layout, shortlist_of
from decode.drafters.levelwise import Guesses, Level, PathDrafter
from decode.ops.fast_topk import TopK, top_k
from decode.target import Target
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.markov import MarkovHeads
from medusa.heads.sequential import State
from medusa.vocabulary import token_ids


class Trellis(NamedTuple):
    """The scores of all paths over the candidates of K heads, in B texts: logits, or for dynamic trees confidences."""

    ids: Tensor  # [K, B, M] the token ids of the candidates
    first: Tensor  # [B, 1, M] of the candidates of the first head
    tables: Tensor  # [K - 1, B, M, M] of each head's candidates (last) after each candidate of the head before it


class LookUps:
    """How to fill a static tree of N nodes from the order of the candidates after each candidate."""

    def __init__(self, levels: Sequence[Level], shortlist: int) -> None:
        """Plan the look-ups for the `levels` of a tree and M = `shortlist` candidates of each head."""
        self.first = levels[0].guess[None]  # [1, W] the ranks of the nodes of depth 1, whose candidates are in order
        self.most = max((level.top for level in levels[1:]), default=0)  # R, the candidates to order after each one
        # By level below the first: each node's parent among the nodes of the level above [W], and the place of the
        # node's rank in the orders [K - 1, M, R] after the parent's head's first candidate, [1, W].
        self.levels: list[tuple[Tensor, Tensor]] = []
        for head, (above, level) in enumerate(pairwise(levels)):
            parent, rank = above.expanded[level.parent], level.guess - level.parent * level.top
            self.levels.append((parent, head * shortlist * self.most + rank[None]))
        starts = [torch.full_like(level.parent, head * shortlist) for head, level in enumerate(levels)]
        self.start = torch.cat(starts)  # [N - 1] the place of the first candidate of each node's head among [K, M]

    def filled(self, root: Tensor, ids: Tensor, tables: Tensor) -> Tensor:
        """Fill the tree below the roots [B] with candidates [K, B, M], by their tables: the tokens [B, N]."""
        if self.most == 0:  # a tree of depth 1 has no tables, and orders nothing
            order = tables[..., :0]
        elif self.most == 1:  # chains; `top_k` would also find the values
            order = tables.argmax(-1, keepdim=True)
        else:
            order = top_k(tables, self.most).indices  # [K - 1, B, M, R]
        guesses = ids.transpose(0, 1).flatten(1).gather(1, self._places(len(root), order))
        return torch.cat([root[:, None], guesses], dim=1)

    def _places(self, texts: int, order: Tensor) -> Tensor:
        """Find the places [B, N - 1] of all nodes except the root among the candidates [K, M]."""
        found, order = [self.first.expand(texts, -1)], order.transpose(0, 1).flatten(1)  # [B, (K - 1) M R]
        for parent, rank in self.levels:
            found.append(order.gather(1, torch.add(rank, found[-1].index_select(1, parent), alpha=self.most)))
        return torch.cat(found, dim=1) + self.start


class TrellisDrafter(PathDrafter):
    """Drafts trees over the candidates of Markov heads: `tree.candidates.shortlist` for each head."""

    heads: MarkovHeads

    def __init__(self, heads: MarkovHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Make a drafter that fills `tree`; raises a `RequestError` if heads, backbone and tree do not match."""
        super().__init__(heads, backbone, tree, target)
        wanted = max(shortlist_of(tree), tree.candidates.max_rank + 1)
        self.shortlist = min(wanted, heads.config.draft_vocab_size(backbone.vocab_size))  # M
        self.depth = self.tree.max_depth  # K
        if self.depth and not isinstance(self.tree, DynamicTree):
            self.look_ups = LookUps(self.levels, self.shortlist)

    def independent(self, frontier: Frontier) -> tuple[Tensor, Tensor]:
        """The hidden states [B, H], and the logits [K, B, V] of the heads' independent parts after them."""
        hidden = frontier.hidden.to(self.device, self.dtype)
        known = self.heads.known(self.heads.embed(frontier.root, self.backbone.embed), slice(self.depth))
        features = self.heads.independent(hidden, known, slice(self.depth))
        return hidden, self.heads.logits(features, self.lm_head)

    def begin(self, frontier: Frontier) -> Trellis:
        return self.trellis(frontier, *self.independent(frontier))

    def trellis(self, frontier: Frontier, hidden: Tensor, logits: Tensor) -> Trellis:
        """Choose the candidates and compute their tables, from what `independent` returns."""
        best = top_k(logits, self.shortlist)
        ids = token_ids(self.heads, best.indices)
        first, tables = best.values[0, :, None], self.tables(hidden, ids, best)
        if isinstance(self.tree, DynamicTree):
            first, tables = confident(self.tree, logits, best.indices, tables)
        there = frontier.root.device
        return Trellis(ids.to(there), first.to(there), tables.to(there))

    def tables(self, hidden: Tensor, ids: Tensor, best: TopK) -> Tensor:
        """Compute the logits [K - 1, B, M, M] of each head's candidates after each candidate of the head before it.

        `ids` are the candidates' token ids [K, B, M]. `best` has their logits without path terms, and their indices in
        the heads' vocabulary."""
        num_heads, texts = ids.shape[:2]
        values, guesses = self.path_rows(ids, best.indices)
        codes = self.heads.gates(hidden, slice(num_heads - 1)).flatten(0, 1)[:, None] * values
        alone, columns = best.values.flatten(0, 1)[texts:, None], guesses.transpose(1, 2)
        if alone.dtype != codes.dtype:  # the heads and a shared LM head can have different ones
            dtype = torch.promote_types(alone.dtype, codes.dtype)
            alone, codes, columns = alone.to(dtype), codes.to(dtype), columns.to(dtype)
        return torch.baddbmm(alone, codes, columns).unflatten(0, (-1, texts))

    def path_rows(self, ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of candidates before a guess and as guesses, both [(K - 1) B, M, R].

        The product of two such rows with a gate between them is a path term. `ids` and `places`: [K, B, M]."""
        heads, before, places, later = self.heads, ids[:-1], places[1:], slice(ids.shape[0] - 1)
        embedded = heads.embed(before, self.backbone.embed)
        values = heads.values(embedded.flatten(1, 2), later).unflatten(1, before.shape[1:])
        if heads.lm_heads is None:
            columns = self.backbone.head_weight[ids[1:]].to(values.dtype).transpose(2, 3)
        else:
            at = places[:, :, None].expand(-1, -1, embedded.shape[-1], -1)
            columns = heads.lm_heads[1 : len(places) + 1, None].expand(-1, places.shape[1], -1, -1).gather(3, at)
        guesses = (heads.out[later, None] @ columns).transpose(2, 3)  # columns: [K - 1, B, H, M]
        return values.flatten(0, 1), guesses.flatten(0, 1)

    def _static(self, frontier: Frontier) -> Draft:
        hidden, logits = self.independent(frontier)
        ids, _, tables = self.trellis(frontier, hidden, logits)
        return Draft(self.look_ups.filled(frontier.root, ids, tables), self.topology)

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
    held = alone[1:].exp().sum(-1).log()[..., None, None]  # [K - 1, B, 1, 1]; `logsumexp` starts four times as much
    return alone[0, :, None], tree.scaled(tables, first=1).log_softmax(-1) + held
