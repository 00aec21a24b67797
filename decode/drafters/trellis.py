"""Drafts with Markov heads: one pass of all heads and one table for each pair of neighbouring heads, then look-ups.

The heads' independent parts, which know the root, give the candidates of each head, its M most probable tokens. The
first head has no other part. All further paths lead from a candidate of one head to a candidate of the next. So K - 1
tables [M, M] of logits describe them (a trellis, as in Viterbi decoding):

                 root ── C_1 ══ C_2 ══ C_3        ══ a table of M x M logits

One batched product computes all tables, and the rest is `LevelwiseDrafter` with a step that looks up a row. Where a CPU
has to put many rows in order, it computes only those that the tree reads (`decode.drafters.trellis_rows`). In both
forms the LM head is read once, whatever the tree. `PathDrafter` drafts with the same heads without shortlists, and is
the oracle.

Shapes: B texts, K heads (as many as the tree is deep), M candidates of a head, W nodes, H hidden size, R the rank of
the path term, V the heads' vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from decode.draft import Draft, Frontier
from decode.drafters.best_first import Ranked, grown_on_host, grows_on_host
from decode.drafters.layouts import TOP, DynamicTree, Layout
from decode.drafters.levelwise import Guesses, Level, PathDrafter
from decode.drafters.path_rows import PathRows
from decode.drafters.trellis_rows import Candidates, HostLevel, HostRows
from decode.ops.fast_topk import top_k
from decode.target import Target
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.markov import MarkovHeads
from medusa.heads.sequential import State
from medusa.vocabulary import rows_for, token_ids

LEAST_TEXTS = 2
"""Texts from which the host fills static trees row by row. For one text, tables take as long, or a tenth less time."""


class Trellis(NamedTuple):
    """The scores of all paths over the candidates of K heads, in B texts: logits, or for dynamic trees confidences."""

    ids: Tensor  # [K, B, M] the token ids of the candidates
    first: Tensor  # [B, 1, M] of the candidates of the first head
    tables: Tensor  # [K - 1, B, M, M] of each head's candidates (last) after each candidate of the head before it

    def to(self, device: torch.device) -> Trellis:
        return Trellis(*(part.to(device) for part in self))


class LookUps:
    """How to fill a static tree of N nodes from the order of the candidates after each candidate."""

    def __init__(self, levels: Sequence[Level], shortlist: int) -> None:
        """Plan the look-ups for the `levels` of a tree and M = `shortlist` candidates of each head."""
        self.first = levels[0].guess[None]  # [1, W] the ranks of the nodes of depth 1, whose candidates are in order
        self.most = max((level.top for level in levels[1:]), default=0)  # R, the candidates to order after each one
        # By level below the first: each node's parent among the nodes of the level above [W], and the place of the
        # node's rank in the orders [K - 1, M, R] after the parent's head's first candidate, [1, W].
        self.levels = [
            (
                above.expanded[level.parent],
                head * shortlist * self.most + (level.guess - level.parent * level.top)[None],
            )
            for head, (above, level) in enumerate(pairwise(levels))
        ]
        starts = [torch.full_like(level.parent, head * shortlist) for head, level in enumerate(levels)]
        self.start = torch.cat(starts)  # [N - 1] the place of the first candidate of each node's head among [K, M]

    def candidates(self, tables: Tensor) -> Tensor:
        """Choose the places [B, N - 1] of all nodes except the root among the candidates [K, M]."""
        found = [self.first.expand(tables.shape[1], -1)]
        if self.most:
            order = top_k(tables, self.most).indices.transpose(0, 1).flatten(1)  # [B, (K - 1) M R]
            for parent, rank in self.levels:
                found.append(order.gather(1, torch.add(rank, found[-1].index_select(1, parent), alpha=self.most)))
        return torch.cat(found, dim=1) + self.start


class TrellisDrafter(PathDrafter):
    """Drafts trees over the candidates of Markov heads: `tree.candidates.shortlist` for each head."""

    heads: MarkovHeads

    def __init__(self, heads: MarkovHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Make a drafter that fills `tree`; raises a `RequestError` if heads, backbone and tree do not match."""
        super().__init__(heads, backbone, tree, target)
        static = self.tree.candidates
        wanted = max(static.shortlist, static.max_rank + 1)
        self.shortlist = min(wanted, heads.config.draft_vocab_size(backbone.vocab_size))  # M
        self.depth = self.tree.max_depth  # K
        self.kept = PathRows.of(heads, backbone)
        if self.depth and not isinstance(self.tree, DynamicTree):
            self.look_ups = LookUps(self.levels, self.shortlist)
            self.host_levels = [HostLevel.of(level) for level in self.levels if level.guess.is_cpu]

    def candidates(self, frontier: Frontier) -> Candidates:
        """Choose the candidates of K heads after B texts."""
        heads, later = self.heads, slice(self.depth - 1)
        if self.kept is not None and not torch.compiler.is_compiling():
            self.kept.refresh(heads, self.backbone)
        hidden = frontier.hidden.to(heads.device, self.dtype)
        features = heads.independent(hidden, self.known(frontier.root), slice(self.depth))
        logits = heads.logits(features, self.lm_head)  # [K, B, V]
        best = top_k(logits, self.shortlist)
        ids, gates = token_ids(heads, best.indices), heads.gates(hidden, later)
        guesses = self.guess_rows(best.indices[1:])
        if not isinstance(self.tree, DynamicTree):
            return Candidates(ids, best.values[0, :, None], best.values[1:], gates, guesses, gates.new_empty(0))
        tree = self.tree
        first, held = confident(tree, logits, best.indices)
        alone = tree.scaled(best.values[1:], first=1)
        return Candidates(ids, first, alone, tree.scaled(gates, first=1).to(gates), guesses, held)

    def begin(self, frontier: Frontier) -> Trellis:
        return self.trellis(self.candidates(frontier)).to(frontier.root.device)

    def trellis(self, found: Candidates) -> Trellis:
        """Compute the tables of all pairs of candidates of neighbouring heads."""
        later = slice(self.depth - 1)
        logits = found.after(self.values(found.ids[:-1], later))
        tables = logits.log_softmax(-1) + found.held[..., None, None] if isinstance(self.tree, DynamicTree) else logits
        return Trellis(found.ids, found.first, tables)

    def known(self, root: Tensor) -> Tensor:
        """What the heads know of the roots [B], [K, B, H]."""
        if self.kept is not None:
            return self.kept.known(root, self.depth)
        return self.heads.known(self.heads.embed(root, self.backbone.embed), slice(self.depth))

    def values(self, tokens: Tensor, heads: slice) -> Tensor:
        """The rows [k, B, W, R] of tokens [k, B, W], each before a guess of one of the k `heads` after head 0."""
        if self.kept is not None:
            return self.kept.values(tokens, heads)
        embedded = self.heads.embed(tokens, self.backbone.embed)
        return self.heads.values(embedded.flatten(1, 2), heads).unflatten(1, tokens.shape[1:])

    def guess_rows(self, places: Tensor) -> Tensor:
        """The rows [k, B, M, R] of guesses of the first k heads after head 0, indices [k, B, M] in their vocabulary."""
        if self.kept is not None:
            return self.kept.guess_rows(places)
        heads, dtype, k = self.heads, self.dtype, len(places)
        if heads.lm_heads is None:
            columns = rows_for(heads, self.backbone.head).weight[places].to(dtype).transpose(2, 3)
        else:
            at = places[:, :, None].expand(-1, -1, heads.out.shape[-1], -1)
            columns = heads.lm_heads[1 : k + 1, None].expand(-1, places.shape[1], -1, -1).gather(3, at)
        return (heads.out[:k, None] @ columns).transpose(2, 3)  # columns: [k, B, H, M]

    def rows_on_host(self, frontier: Frontier) -> HostRows | None:
        """The candidates for NumPy; `None` if it cannot read them or the products, or had to convert all products."""
        kept = self.kept
        if kept is None or torch.compiler.is_compiling() or not (frontier.root.is_cpu and kept.before.is_cpu):
            return None
        return HostRows(self.candidates(frontier), kept) if kept.before.itemsize > 2 else None

    def _static(self, frontier: Frontier) -> Draft:
        rows = self.rows_on_host(frontier) if len(frontier.root) >= LEAST_TEXTS else None
        if rows is not None:
            return Draft(rows.filled(frontier.root, self.host_levels), self.topology)
        root, (ids, _, tables) = frontier.root[:, None], self.begin(frontier)
        guesses = ids.transpose(0, 1).flatten(1).gather(1, self.look_ups.candidates(tables))
        return Draft(torch.cat([root, guesses], dim=1), self.topology)

    def _dynamic(self, frontier: Frontier, tree: DynamicTree) -> Draft:
        if not grows_on_host(frontier.root, tree):
            return super()._dynamic(frontier, tree)
        count = min(TOP, tree.num_nodes - 1, self.shortlist)
        rows = self.rows_on_host(frontier)
        if rows is not None:
            return grown_on_host(frontier.root, tree, rows.ids, partial(rows.ranked, count))
        ids, first, tables = self.begin(frontier)
        of_root, order = first[:, 0, :count].tolist(), top_k(tables, count)
        confidences, places = order.values.detach().numpy(), order.indices.numpy()

        def guesses(row: int, depth: int, place: int) -> Ranked:
            if depth == 0:
                return of_root[row], range(count)  # the candidates are in order
            return confidences[depth - 1, row, place].tolist(), places[depth - 1, row, place].tolist()

        return grown_on_host(frontier.root, tree, ids.tolist(), guesses)

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
        return logits  # they are confidences already (`trellis`)


def confident(tree: DynamicTree, logits: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Find how probable candidates are without path terms, in log probabilities at the temperatures of `tree`.

    `logits` [K, B, V] are those of the independent parts, and `places` [K, B, M] the candidates in them. Returns the
    log probabilities of the first head's candidates, [B, 1, M], and of all candidates of each other head together,
    [K - 1, B]. The candidates of a head hold the same probability after every token: all that they hold in `logits`.
    Two other rules accepted less (docs/log.md)."""
    alone = tree.log_confidences(logits).gather(-1, places)
    return alone[0, :, None], alone[1:].exp().sum(-1).log()  # `logsumexp` starts four times as many operations
