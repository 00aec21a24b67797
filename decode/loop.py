"""The loop: prefill, then propose -> verify -> accept -> compact, a generator of steps.

Nothing is left on the model: cache, masks and text belong to a session, and a session to one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.accept import (
    Acceptance,
    Passes,
    accept_greedy,
    accept_longest,
    accept_sampled,
    accept_walk,
    among_best,
    near_best,
    typical,
)
from decode.cache import TreeCache
from decode.draft import Draft, Drafter, Frontier
from decode.heads_cache import HeadsCache
from decode.prefill import prefill
from decode.sampling import Target, Truncation, most_probable
from decode.sequences import Request, Sequences
from decode.strategies.contrastive import Amateur, AmateurState, ContrastVerifier
from decode.timers import Timer
from decode.verify import Verifier
from medusa.backbone import Backbone, Readout
from medusa.heads.independent import MedusaHeads


@dataclass
class Step:
    """What one step gave, per row of the session."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Tokens written, cut at EOS, stop or length; only rows that took part."""
    lengths: dict[int, int] = field(default_factory=dict)
    """1 + accepted, before the cut; a last root that needed no forward counts 1."""


class Acceptor(NamedTuple):
    """An acceptance rule, its constants (typical acceptance's: paper section 2.3.1) and the kind of draft it judges."""

    rule: str
    epsilon: float = 0.09
    delta: float = 0.3
    draft: str = "topk"
    """topk: the drafter's best guesses; sample: draws from its distributions."""
    limit: int | None = None
    """Of the rules topk and distance."""

    @property
    def name(self) -> str:
        """As a user writes it."""
        return self.rule if self.limit is None else f"{self.rule}:{self.limit}"

    @property
    def passes(self) -> Passes | None:
        """What a rule lets stay that keeps the longest path of it; `None` for those that walk down one path."""
        if self.rule == "typical":
            return lambda scores: typical(scores.softmax(-1), self.epsilon, self.delta)
        if self.limit is None:
            return None
        judge, limit = {"topk": among_best, "distance": near_best}[self.rule], self.limit
        return lambda scores: judge(scores, limit)

    @property
    def truncation(self) -> Truncation | None:
        return Truncation(self.epsilon, self.delta) if self.rule == "typical-sampled" else None


class Session:
    """Rows being decoded: the backbone, what is written, and what the text is to follow; `run` is the loop."""

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[Request],
        slack: int = 0,
        truncation: Truncation | None = None,
        keep_hidden: bool = False,
        heads: MedusaHeads | None = None,
        amateur: Amateur | None = None,
    ) -> None:
        """
        Args:
            slack: nodes of a tree, for which cache and prefixes keep room.
            truncation: of the target, if any.
            keep_hidden: keep the hidden states that are read, too.
            heads: those that draft, if they are to read along (prefix attention, or a memory of their own).
            amateur: whom the backbone is contrasted with (`decode.strategies.contrastive`); texts end where its
            context does, too.
        """
        self.backbone = Backbone(model)
        self.target = Target(requests, truncation)
        contexts = [b.context for b in (self.backbone, amateur and Backbone(amateur.model)) if b and b.context]
        self.sequences = Sequences(requests, min(contexts, default=None), self.backbone.device, slack)
        longest = max(len(request.prompt) for request in requests)
        ahead = min(max(request.max_new_tokens for request in requests), 1024)  # more is added as the text grows
        self.cache = TreeCache(model.config, len(requests), capacity=longest + ahead + slack + 1)
        self.beside = None if amateur is None else AmateurState(amateur, len(requests), self.cache.capacity)
        self.kept_hidden: list[list[Tensor]] | None = [[] for _ in requests] if keep_hidden else None
        """Per row, in pieces [n, H]: the hidden states of its tokens, as far as they were read."""
        self.reader = HeadsCache.of(heads, self.backbone, len(requests), self.cache.capacity)

    def prefill(self, most_probable_first: bool = False) -> Frontier:
        """Read the prompts, and decide on the first token of each row."""
        prompts, device = self.sequences.prompts, self.backbone.device
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        watch = self._watch if self.reader is not None or self.kept_hidden is not None else None
        hidden, logits = prefill(self.backbone, self.cache, ids, lengths, watch)
        if self.reader is not None:
            self.reader.cut(lengths)
        if self.beside is not None:
            logits = self.beside.prefill(ids, lengths, logits)
        rows = list(range(len(prompts)))
        root = self.target.next(rows, self.sequences, logits, most_probable_first).to(device)
        return self._frontier(root, hidden, rows)

    def verifier(self) -> Verifier:
        """What runs the backbone, and an amateur beside it, over drafts on top of the text."""
        if self.beside is None:
            return Verifier(self.backbone, self.cache, self.sequences)
        return ContrastVerifier(self.backbone, self.cache, self.sequences, self.beside)

    @property
    def caches(self) -> list[TreeCache]:
        """Of all models that verify; they hold the same nodes."""
        return [self.cache] if self.beside is None else [self.cache, self.beside.cache]

    def commit(self, path: Tensor, counts: list[int], in_place: bool = False) -> None:
        """Keep accepted nodes in the caches (`TreeCache.commit`)."""
        for cache in self.caches:
            cache.commit(path, counts, in_place)

    def select(self, left: list[int]) -> None:
        """Keep these rows of the caches (`TreeCache.select`)."""
        for cache in self.caches:
            cache.select(left)

    def _frontier(self, root: Tensor, hidden: Tensor, rows: list[int]) -> Frontier:
        return Frontier(root, hidden, rows, None if self.reader is None else self.reader.context_kv())

    def _watch(self, hidden: Tensor, next_ids: Tensor, start: int) -> Tensor:
        """hidden [B, T, H] of the prompts' tokens from `start` on -> what the heads read of them."""
        if self.kept_hidden is not None:
            for row, prompt in enumerate(self.sequences.prompts):
                self.kept_hidden[row].append(hidden[row, : max(len(prompt) - start, 0)])
        return hidden if self.reader is None else self.reader.piece(hidden, next_ids)

    def keep(self, hidden: Tensor, path: Tensor, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """hidden [B, N, H] of a forward: keep those on the first `lengths` nodes of each path [B, D], if asked to."""
        if self.kept_hidden is None:
            return
        for states, nodes, length, row in zip(hidden, path.to(hidden.device), lengths, rows, strict=True):
            self.kept_hidden[row].append(states[nodes[:length]])

    @torch.inference_mode()
    def run(self, drafter: Drafter, verifier: Verifier, acceptor: Acceptor, clock: Timer) -> Iterator[Step]:
        """Decode until every row has ended; one `Step` per step, the prefill not counted."""
        sequences = self.sequences
        # Typical acceptance decides on every root by argmax, so on the first one too.
        frontier = self.prefill(most_probable_first=acceptor.rule == "typical")
        roots = dict(zip(frontier.rows, frontier.root.tolist(), strict=True))
        clock.start()
        while frontier.rows:
            step = Step()
            for row in frontier.rows:
                written = sequences.extend(row, [roots[row]])
                if written:
                    step.ids[row], step.lengths[row] = written, 1
            frontier = self._unfinished(frontier)
            rows = frontier.rows
            if not rows:
                if step.ids:
                    yield step
                return
            clock.lap("other")
            draft = drafter.propose(frontier)
            clock.lap("propose")
            readout = verifier(draft)
            clock.lap("verify")
            accepted = self._accept(draft, readout, rows, acceptor, verifier.room(draft))
            lengths, next_roots, written_ids = unpack(pack(draft, accepted).tolist())
            clock.lap("accept")
            frontier = self.move_on(frontier, draft, readout, accepted, lengths)
            clock.lap("compact")
            roots = dict(zip(rows, next_roots, strict=True))
            for row, ids, length in zip(rows, written_ids, lengths, strict=True):
                step.ids[row] += sequences.extend(row, ids[1:length])
                step.lengths[row] = length
            frontier = self._unfinished(frontier)
            clock.lap("other")
            yield step
            clock.start()

    def move_on(
        self, frontier: Frontier, draft: Draft, readout: Readout, accepted: Acceptance, lengths: list[int]
    ) -> Frontier:
        """Keep what was accepted, `lengths` nodes of each path; where the next step starts."""
        self.commit(accepted.path, lengths, in_place=draft.topology.max_children <= 1)
        self.keep(readout.hidden, accepted.path, lengths, frontier.rows)
        read_on = self._heads_read(frontier.hidden, draft, readout.hidden, accepted, lengths)
        return self._frontier(accepted.next_root, read_on, frontier.rows)

    def _heads_read(
        self, before: Tensor, draft: Draft, hidden: Tensor, accepted: Acceptance, lengths: list[int]
    ) -> Tensor:
        """hidden [B, N, H] of a step -> [B, H] what the heads start the next one from: where the path ended.

        `before` [B, H] is what they started this one from.
        """
        if self.reader is None:
            return at_end(hidden, accepted)
        path = accepted.path[:, : max(lengths)].clamp_min(0)
        ids, path = draft.ids.gather(1, path), path.to(hidden.device)[:, :, None]
        return self.reader.path(before, hidden.gather(1, path.expand(-1, -1, hidden.shape[-1])), ids, lengths)

    def _unfinished(self, frontier: Frontier) -> Frontier:
        """Drop the rows that have ended from the batch, so that no forward is spent on them."""
        root, hidden, rows, _ = frontier
        left = [index for index, row in enumerate(rows) if self.sequences.finish_reason[row] is None]
        if left and len(left) < len(rows):
            self.select(left)
            if self.reader is not None:
                self.reader.select(left)
            index = torch.tensor(left, device=root.device)
            root, hidden = root[index], hidden[index.to(hidden.device)]
            return self._frontier(root, hidden, [rows[index] for index in left])
        return frontier._replace(rows=[rows[index] for index in left])

    def _accept(
        self, draft: Draft, readout: Readout, rows: list[int], acceptor: Acceptor, room: Tensor | None
    ) -> Acceptance:
        logits, target, passes = readout.logits, self.target, acceptor.passes
        if target.is_argmax and passes is None:
            return accept_greedy(draft, most_probable(logits).to(draft.ids.device), room)

        def scores_after(walking: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
            """Rows are numbered within the batch here, and within the session for whatever belongs to a text."""
            found = []
            paths = draft.topology.at(draft.topology.paths, walking, nodes)[:, 1:]  # the root is written already
            for index, node, path in zip(walking.tolist(), nodes.tolist(), paths, strict=True):
                prefix = self.sequences.prefix(rows[index], draft.ids[index, path[path >= 0]])
                found.append(target.scores(rows[index], prefix, logits[index, node]))
            return torch.cat(found), torch.arange(len(found), device=walking.device)

        if passes is not None:
            return accept_longest(draft, scores_after, passes, room)
        draws = target.draws.of(rows)
        if draft.proposal is not None:
            return accept_sampled(draft, scores_after, draws, room)
        return accept_walk(draft, scores_after, lambda *asked: target.decide(draws, *asked), room)


def pack(draft: Draft, accepted: Acceptance) -> Tensor:
    """[B, D + 3] of each row the length of the accepted path, the next root, and the ids on the path.

    All that the host must know of a step, for one transfer. (A path's padding repeats the root.)
    """
    ids = draft.ids.gather(1, accepted.path.clamp_min(0))
    return torch.cat([accepted.length[:, None], accepted.next_root[:, None], ids], dim=1)


def unpack(packed: list[list[int]]) -> tuple[list[int], list[int], list[list[int]]]:
    """What `pack` made, on the host -> lengths, next roots and ids of each row."""
    return [row[0] for row in packed], [row[1] for row in packed], [row[2:] for row in packed]


def at_end(hidden: Tensor, accepted: Acceptance) -> Tensor:
    """hidden [B, N, H] -> [B, H] at the node where each path ended: the only position where heads are read."""
    end = accepted.end.to(hidden.device)
    if len(end) == 1:
        return hidden[0].index_select(0, end)
    return hidden.gather(1, end[:, None, None].expand(-1, -1, hidden.shape[-1]))[:, 0]
