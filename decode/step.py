"""One decoding step: propose a draft, verify it, accept some of its nodes, and compact the KV caches.

All ways of decoding but beam search run `decode_step`: eager, compiled, plain (the draft is the root alone), and the
server's batch. Compiled steps use tensors only; in eager ones, processors that read the text and lazy walks go through
the host. The host reads the result, `Decided.packed`, when a step is done, and keeps the books (`decode.loop`).

Shapes: B rows of the batch, N nodes of a draft, D its depth, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from decode.accept import Acceptance, accept_greedy, accept_longest, accept_sampled, accept_walk, at_end, pack
from decode.cache import TreeCache
from decode.draft import Draft, Drafter, Frontier
from decode.ops.draws import Draws
from decode.ops.fast_topk import most_probable
from decode.ops.transfer import keep_rows, on_device
from decode.reader import Reader
from decode.rules import AcceptanceRule
from decode.sequences import Sequences
from decode.session import HeadsCache
from decode.target import Target
from medusa.backbone import Readout

PART = 1 << 24
"""Scores (rows x nodes x V) that a lossy rule reads at once, which limits the memory that it takes."""


class Decided(NamedTuple):
    """What a step decided, on the device."""

    packed: Tensor  # [B, 2 + D + 1]: each row's path length, next root and token ids of the path (`Acceptance`)
    draft: Draft
    accepted: Acceptance
    hidden: Tensor  # [B, N, H] the hidden states of all nodes


def decode_step(
    state: State, drafter: Drafter, judge: Callable[[Draft, Tensor, State], Acceptance], lap: Callable[[str], object]
) -> Decided:
    """Decode one step of all rows; `lap` is called with the name of each stage when it ends.

    `judge` decides on a draft from the logits [B, N, V] after its nodes: a `Judge` with its draws, or, in compiled
    steps, a `decode.compiled.sampling.Sampler`."""
    draft = drafter.propose(state.frontier())
    lap("propose")
    readout = state.reader(draft)
    lap("verify")
    accepted = judge(draft, readout.logits, state)
    packed = pack(draft, accepted)
    lap("accept")
    state.compact(draft, readout, accepted)
    lap("compact")
    return Decided(packed, draft, accepted, readout.hidden)


class State:
    """What a step reads and changes: the caches of the live rows, and what follows their texts.

    In compiled steps the tensors stay at their addresses, as those of a fixed cache do. Their first rows are live."""

    def __init__(self, reader: Reader, heads_cache: HeadsCache | None, root: Tensor, hidden: Tensor) -> None:
        """Begin after prompts: `root` [B] are the first tokens, `hidden` [B, H] the states that heads read."""
        self.reader, self.heads_cache = reader, heads_cache
        self.root, self.hidden = root, hidden
        self.rows = list(range(len(root)))
        """The session's index of each live row."""
        self.alive = torch.ones_like(root)  # [B], 0 for rows without a text
        self.of_rows = self.root, self.hidden, self.alive
        """In compiled steps: the tensors of all rows in memory, of which a step sees the first ones (`show`)."""

    @property
    def is_fixed(self) -> bool:
        """Whether compiled steps run on this state."""
        return self.reader.cache.fixed

    @property
    def caches(self) -> list[TreeCache]:
        """All caches, of the models that read the texts and of heads."""
        return [*self.reader.caches, *([] if self.heads_cache is None else self.heads_cache.caches)]

    def show(self, rows: int) -> None:
        """Let compiled steps see so many rows: the live ones, and others that do nothing."""
        self.root, self.hidden, self.alive = (tensor[:rows] for tensor in self.of_rows)
        for cache in self.caches:
            cache.show(rows)

    def like(self, rows: int, capacity: int) -> State:
        """Make a state of compiled steps for up to so many `rows` like these, with caches of `capacity` slots each."""
        reader, cache = self.reader, self.heads_cache
        backbone, device = reader.backbone, reader.cache.filled.device
        caches = TreeCache(backbone.model.config, rows, capacity, device, fixed=True)
        of_heads = None if cache is None else HeadsCache(cache.heads, backbone, rows, capacity, fixed=True)
        hidden = self.hidden.new_zeros(rows, *self.hidden.shape[1:])
        return State(Reader(backbone, caches), of_heads, self.root.new_zeros(rows), hidden)

    def empty(self) -> None:
        """Drop all texts of compiled steps, before others join."""
        self.rows = []
        self.of_rows[-1].zero_()
        for cache in self.caches:
            cache.empty()

    def frontier(self) -> Frontier:
        """What drafters read: the last decided tokens, and the hidden states before them."""
        context_kv = None if self.heads_cache is None else self.heads_cache.context_kv()
        return Frontier(self.root, self.hidden, self.rows, context_kv)

    def compact(self, draft: Draft, readout: Readout, accepted: Acceptance) -> None:
        """Keep the accepted path of each row in the caches, and make its end the next frontier."""
        counts = accepted.length * self.alive  # 0: nothing of the row changes
        path = accepted.path if draft.topology.max_children > 1 else None  # in a chain no node moves
        for cache in self.reader.caches:
            cache.commit(path, counts)
        if self.heads_cache is None:
            hidden = at_end(readout.hidden, accepted)
        else:
            nodes = accepted.path.clamp_min(0)
            on_path = nodes[:, :, None].expand(-1, -1, readout.hidden.shape[-1]).to(readout.hidden.device)
            states, ids = readout.hidden.gather(1, on_path), draft.ids.gather(1, nodes)
            hidden = self.heads_cache.path(self.hidden, states, ids, counts)
        root = accepted.next_root
        if self.is_fixed:
            moves = counts > 0
            root = torch.where(moves, root, self.root)
            hidden = torch.where(moves.to(hidden.device)[:, None], hidden, self.hidden)
        self.begin(root, hidden)

    def begin(self, root: Tensor, hidden: Tensor) -> None:
        """Set the last decided tokens [B], and the hidden states [B, H] before them."""
        if self.is_fixed:
            self.root.copy_(root.clamp_min(0))  # NO_TOKEN has no embedding; its row ends before it is read
            self.hidden.copy_(hidden)
        else:
            self.root, self.hidden = root, hidden

    def count(self, lengths: Sequence[int]) -> None:
        """Tell the caches how many nodes of each live row a step has committed, which the host knows now."""
        for cache in self.caches:
            cache.count(lengths)

    def select(self, left: Sequence[int]) -> None:
        """Keep only the live rows at the places `left`, because the texts of the others have ended."""
        self.rows = [self.rows[place] for place in left]
        if self.is_fixed:  # no wait, as a step may be running
            keep_rows(self.of_rows, left)
            self.of_rows[-1][len(left) :] = 0
        elif not left:  # nothing follows
            return
        else:
            index = on_device(left, self.root.device)
            self.root, self.alive = self.root[index], self.alive[index]
            self.hidden = self.hidden[index.to(self.hidden.device)]
        for cache in self.caches:
            cache.select(left)

    def join(self, other: State, places: Sequence[int]) -> None:
        """Append the rows of `other`, whose texts become the rows `places` of the session; `other` is used up."""
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.join(theirs)
        tensors = other.root, other.hidden, other.alive
        if self.is_fixed:
            start = len(self.rows)
            for own, new in zip(self.of_rows, tensors, strict=True):
                own[start : start + len(places)] = new
            self.of_rows[0].clamp_min_(0)  # as in `begin`
        else:
            pairs = zip((self.root, self.hidden, self.alive), tensors, strict=True)
            self.root, self.hidden, self.alive = map(torch.cat, pairs)
        self.rows = [*self.rows, *places]


class Judge:
    """Decides in eager steps which nodes of drafts are accepted, by the target of a session's texts.

    Rules that test all nodes accept the longest path that passes. Otherwise target and draft tell how to walk: by
    argmax, by p / q for drawn drafts, or by a decision at each node."""

    def __init__(self, rule: AcceptanceRule, target: Target, sequences: Sequences, lazy: bool) -> None:
        """Apply `rule`; `lazy`: whether walks stop where they end (`decode.accept.TreeWalk`)."""
        self.rule, self.target, self.sequences, self.lazy = rule, target, sequences, lazy

    def __call__(self, draws: Draws, draft: Draft, logits: Tensor, state: State) -> Acceptance:
        """Decide on a draft from the `logits` [B, N, V] after its nodes."""
        target, depth_limit = self.target, state.reader.depth_limit(draft)
        if not self.rule.kind.walks:
            scores_of_nodes = self._scores_of_nodes(draft, logits, state.rows)
            return accept_longest(draft, scores_of_nodes, self.rule.passes, depth_limit)
        if target.is_argmax:
            return accept_greedy(draft, most_probable(logits).to(draft.ids.device), depth_limit)
        scores, ends = partial(self._scores, draft, logits, state.rows), self._ends(draft, state.rows)
        if draft.proposal is not None:
            return accept_sampled(draft, scores, draws, depth_limit, self.lazy, ends)
        return accept_walk(draft, scores, partial(target.decide, draws), depth_limit, self.lazy, ends)

    def _ends(self, draft: Draft, live: Sequence[int]) -> Tensor:
        """Return the nodes [B, N] at which a text ends: with its last allowed token, or an EOS.

        A walk asks processors for each token of a text, and draws it, but nothing after it. Criteria such as stop
        strings are asked later: processors may then see more, and the draws are taken back (`Stepper.rewind`)."""
        device, sequences = draft.ids.device, self.sequences
        left = on_device([sequences.tokens_left(row) for row in live], device)
        ends = (draft.topology.depth >= left[:, None]).expand_as(draft.ids)
        if eos := sorted(set().union(*(sequences.eos[row] for row in live))):
            own = on_device([[token if token in sequences.eos[row] else -1 for token in eos] for row in live], device)
            ends = ends | (draft.ids[:, :, None] == own[:, None]).any(-1)
        return ends

    def _scores(
        self, draft: Draft, logits: Tensor, live: Sequence[int], rows: Tensor, nodes: Tensor, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Return the target's scores [R, V] after node `nodes[i]` of row `rows[i]`, and their indices 0 to R - 1."""
        target, sequences = self.target, self.sequences
        at = logits[rows.to(logits.device), nodes.to(logits.device)]
        index = torch.arange(len(nodes), device=nodes.device)
        if target.is_textless:
            return target.scores_of(at, nodes.device), index
        # The root is written already. A row whose walk ended above `depth` gets other tokens, which changes nothing.
        below = draft.topology.at(draft.topology.paths, rows, nodes)[:, 1 : depth + 1].clamp_min(0)
        tokens, found = draft.ids[rows[:, None], below], []
        for place, row in enumerate(rows.tolist() if self.lazy else range(len(rows))):
            prefix = sequences.prefix(live[row], tokens[place])
            found.append(target.scores(live[row], prefix, at[place]))
        return torch.cat(found), index

    def _scores_of_nodes(self, draft: Draft, logits: Tensor, live: Sequence[int]) -> Iterator[Tensor]:
        """Yield the target's scores [b, N, V] after all nodes of the draft, for b rows at a time."""
        target, device = self.target, draft.ids.device
        if target.is_textless:
            for part in logits.split(max(1, PART // logits[0].numel())):
                yield target.scores_of(part.flatten(0, 1), device).view_as(part)
            return
        lines = [[[n for n in line if n >= 0] for line in lines] for lines in draft.topology.paths.tolist()]
        for place, row in enumerate(live):
            paths = lines[0 if draft.topology.is_shared else place]
            prefix = self.sequences.prefix(row)
            yield target.scores_of_nodes(row, prefix, draft.ids[place], paths, logits[place])[None]
