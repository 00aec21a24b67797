"""Steps of the running batch that draft much, little or nothing, as `Pace` chooses. The texts do not depend on it.

A step without a draft is one of plain decoding. Caches of heads that look back are not filled in such a step, which
would cost up to a quarter of it, but before the next draft."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.draft import Drafter, forget
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import Layout, smaller
from decode.loop import StepOutcome, Stepper, Timer, TreeStepper
from decode.ops.transfer import on_device
from decode.reference import PlainStepper
from decode.serve.pace import Pace
from decode.settings import LOSSLESS, AcceptanceRule

MOST_UNREAD = 256  # tokens of a text that wait for caches of heads, which limits the memory of their hidden states


def drafts_of(source: DrafterFactory) -> list[DrafterFactory | None]:
    """List the drafts among which a server chooses: whole, with a third of the nodes, a ninth, ..., and none."""
    found = [source]
    while (less := found[-1].reshaped(_third)).num_nodes < found[-1].num_nodes:
        found.append(less)
    return [*found, None]


def _third(tree: Layout) -> Layout:
    return smaller(tree, max(round(tree.num_nodes / 3), 2))


def may_adapt(rule: AcceptanceRule) -> bool:
    """Whether texts do not depend on the drafts. They do with lossy rules, and so do samples with drawn drafts."""
    return rule.rule in LOSSLESS and rule.draft == "topk"


class AdaptiveStepper(Stepper):
    """Decodes each step with one of several drafts or with none."""

    def __init__(self, tree: TreeStepper, drafts: Sequence[DrafterFactory | None], pace: Pace) -> None:
        """Decode the session of `tree`, which has the first of the `drafts`; `None` is plain decoding."""
        self.session, self.tree, self.plain = tree.session, tree, PlainStepper(tree.session)
        self.drafts, self.pace = drafts, pace
        self.drafters: dict[int, Drafter] = {0: tree.drafter}  # those that were used, by the index of their draft
        self.unread: dict[int, list[Tensor]] = {}
        """Per row: hidden states [1, H] of its last tokens that the caches of the heads lack."""

    def start(self) -> tuple[list[int], list[int]]:
        return self.tree.start()

    def step(self, timer: Timer) -> StepOutcome:
        texts = len(self.tree.frontier.rows)
        start, chosen = perf_counter(), self.pace.choose(texts)
        factory = self.drafts[chosen]
        outcome = self._plain_step(timer) if factory is None else self._drafted_step(timer, chosen, factory)
        self.pace.add(texts, chosen, perf_counter() - start, sum(outcome.lengths))
        return outcome

    def _drafted_step(self, timer: Timer, chosen: int, factory: DrafterFactory) -> StepOutcome:
        self._fill_caches()
        if chosen not in self.drafters:
            self.drafters[chosen] = factory.start(self.session)
        self.tree.drafter = self.drafters[chosen]
        return self.tree.step(timer)

    def _plain_step(self, timer: Timer) -> StepOutcome:
        frontier, plain = self.tree.frontier, self.plain
        if any(len(waiting) >= MOST_UNREAD for waiting in self.unread.values()):
            self._fill_caches()
            frontier = self.tree.frontier
        plain.rows, plain.roots = frontier.rows, frontier.root
        outcome = plain.step(timer)
        if self.session.heads_cache is None:
            self.tree.frontier = self.session.frontier(plain.roots, plain.hidden[:, -1], frontier.rows)
        else:
            self.tree.frontier = frontier._replace(root=plain.roots)
            for row, hidden in zip(frontier.rows, plain.hidden, strict=True):
                self.unread.setdefault(row, []).append(hidden)
        return outcome

    def _fill_caches(self) -> None:
        """Let the caches of the heads read what plain steps have written."""
        frontier, sequences, cache = self.tree.frontier, self.session.sequences, self.session.heads_cache
        if cache is None or not self.unread:
            return
        nothing = next(iter(self.unread.values()))[0][:0]
        hidden = [torch.cat([nothing, *self.unread.get(row, ())]) for row in frontier.rows]
        counts = list(map(len, hidden))
        ids = [
            torch.tensor(sequences.tail(row, sequences.lengths[row] - 1 - count)[:count])
            for row, count in zip(frontier.rows, counts, strict=True)
        ]
        padded = pad_sequence(ids, batch_first=True).to(frontier.root.device)
        read = cache.path(frontier.hidden, pad_sequence(hidden, batch_first=True), padded, counts)
        has_read = on_device(counts, read.device)[:, None] > 0
        self.tree.frontier = self.session.frontier(
            frontier.root, torch.where(has_read, read, frontier.hidden), frontier.rows
        )
        self.unread.clear()

    def keep(self, left: list[int]) -> None:
        self.tree.keep(left)
        self.unread = {row: self.unread[row] for row in self.tree.frontier.rows if row in self.unread}

    def join(self, other: AdaptiveStepper, places: list[int]) -> None:
        """Take over the texts of `other`, which has just started, as the rows `places`; see `Session.join`."""
        for drafter in self.drafters.values():
            forget(drafter, places)
        self.tree.join(other.tree, places)
