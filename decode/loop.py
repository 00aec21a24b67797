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

from decode.accept import Acceptance, accept_greedy, accept_typical, accept_walk
from decode.cache import TreeCache
from decode.clock import Clock
from decode.draft import Draft, Drafter, Frontier
from decode.sampling import Target, most_probable
from decode.sequences import Request, Sequences
from decode.verify import Verifier
from medusa.backbone import Backbone, Readout


@dataclass
class Step:
    """What one step gave, per row of the session."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """Tokens written, cut at EOS, stop or length; only rows that took part."""
    lengths: dict[int, int] = field(default_factory=dict)
    """1 + accepted, before the cut; a last root that needed no forward counts 1."""


class Acceptor(NamedTuple):
    """An acceptance rule with its constants (paper section 2.3.1)."""

    rule: str
    epsilon: float = 0.09
    delta: float = 0.3


class Session:
    """Rows being decoded: the backbone, what is written, and what the text is to follow; `run` is the loop."""

    def __init__(self, model: PreTrainedModel, requests: Sequence[Request], slack: int = 0) -> None:
        """`slack`: nodes of a tree, for which cache and prefixes keep room."""
        self.backbone = Backbone(model)
        self.target = Target(requests)
        self.sequences = Sequences(requests, self.backbone.context, self.backbone.device, slack)
        longest = max(len(request.prompt) for request in requests)
        ahead = min(max(request.max_new_tokens for request in requests), 1024)  # more is added as the text grows
        self.cache = TreeCache(model.config, len(requests), capacity=longest + ahead + slack + 1)

    def prefill(self, most_probable_first: bool = False) -> Frontier:
        """Read the prompts, right-padded: a causal model never looks at what stands behind a token."""
        prompts, device = self.sequences.prompts, self.backbone.device
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        positions = torch.arange(max(lengths), device=device).expand(len(prompts), -1)
        last = torch.tensor(lengths, device=device) - 1
        hidden, logits = self.backbone.forward(ids, self.cache, last=last, position_ids=positions)
        self.cache.commit_prompt(lengths)
        rows = range(len(prompts))
        return Frontier(self.target.next(rows, self.sequences, logits, most_probable_first).to(device), hidden)

    @torch.inference_mode()
    def run(self, drafter: Drafter, verifier: Verifier, acceptor: Acceptor, clock: Clock) -> Iterator[Step]:
        """Decode until every row has ended; one `Step` per step, the prefill not counted."""
        sequences, cache = self.sequences, self.cache
        # Typical acceptance decides on every root by argmax, so on the first one too.
        frontier = self.prefill(most_probable_first=acceptor.rule == "typical")
        rows = list(range(len(sequences)))
        clock.start()
        while rows:
            step = Step()
            for row, root in zip(rows, frontier.root.tolist(), strict=True):
                written = sequences.extend(row, [root])
                if written:
                    step.ids[row], step.lengths[row] = written, 1
            rows, frontier = self._unfinished(rows, frontier)
            if not rows:
                if step.ids:
                    yield step
                return
            clock.lap("other")
            draft = drafter.propose(frontier)
            clock.lap("propose")
            readout = verifier(draft)
            clock.lap("verify")
            accepted = self._accept(draft, readout, rows, acceptor, verifier.room())
            written_ids, lengths = _to_host(draft, accepted)
            clock.lap("accept")
            cache.commit(accepted.path, lengths)
            frontier = Frontier(accepted.next_root, _at_end(readout.hidden, accepted))
            clock.lap("compact")
            for row, ids, length in zip(rows, written_ids, lengths, strict=True):
                step.ids[row] += sequences.extend(row, ids[1:length])
                step.lengths[row] = length
            rows, frontier = self._unfinished(rows, frontier)
            clock.lap("other")
            yield step
            clock.start()

    def _unfinished(self, rows: list[int], frontier: Frontier) -> tuple[list[int], Frontier]:
        """Drop the rows that have ended from the batch, so that no forward is spent on them."""
        left = [index for index, row in enumerate(rows) if self.sequences.finish_reason[row] is None]
        if left and len(left) < len(rows):
            self.cache.select(left)
            index = torch.tensor(left, device=frontier.root.device)
            frontier = Frontier(frontier.root[index], frontier.hidden[index.to(frontier.hidden.device)])
        return [rows[index] for index in left], frontier

    def _accept(
        self, draft: Draft, readout: Readout, rows: list[int], acceptor: Acceptor, room: Tensor | None
    ) -> Acceptance:
        logits = readout.logits
        if self.target.is_argmax and acceptor.rule != "typical":
            return accept_greedy(draft, most_probable(logits).to(draft.ids.device), room)

        def after(index: int, path: list[int]) -> tuple[int, Tensor, Tensor]:
            more = draft.ids[index, path[1:]] if len(path) > 1 else None  # the root is written already
            return rows[index], self.sequences.prefix(rows[index], more), logits[index, path[-1]]

        if acceptor.rule == "typical":
            return accept_typical(
                draft,
                lambda index, path: self.target.probabilities(*after(index, path)),
                acceptor.epsilon,
                acceptor.delta,
                room,
            )
        return accept_walk(draft, lambda index, path: self.target.draw(*after(index, path)), room)


def _to_host(draft: Draft, accepted: Acceptance) -> tuple[list[list[int]], list[int]]:
    """The ids on each accepted path (the padding repeats the root) and its length: the step's one synchronisation."""
    ids = draft.ids.gather(1, accepted.path.clamp_min(0))
    packed = torch.cat([accepted.length[:, None], ids], dim=1).tolist()
    return [row[1:] for row in packed], [row[0] for row in packed]


def _at_end(hidden: Tensor, accepted: Acceptance) -> Tensor:
    """hidden [B, N, H] -> [B, H] at the node where each path ended: the only position where heads are read."""
    end = accepted.path.gather(1, accepted.length[:, None] - 1).to(hidden.device)  # [B, 1]
    return hidden.gather(1, end[:, :, None].expand(-1, -1, hidden.shape[-1]))[:, 0]
