"""Steps of the running batch that draft much, little or nothing, as `Pace` chooses. The texts do not depend on it.

A step without a draft is one of plain decoding. Caches of heads that look back are not filled in such a step, which
would cost up to a quarter of it, but before the next draft."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter, thread_time

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.compiled.stepper import CompiledStepper
from decode.draft import Drafter, NoDraft, forget
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import smaller
from decode.loop import StepOutcome, Stepper, Timer
from decode.ops.transfer import on_device
from decode.serve.pace import Pace

MOST_UNREAD = 256  # tokens of a text that wait for caches of heads, which limits the memory of their hidden states


def drafts_of(source: DrafterFactory) -> list[DrafterFactory | None]:
    """List the drafts among which a server chooses: whole, with a third of the nodes, a ninth, ..., and none."""
    found = [source]
    while True:
        less = found[-1].reshaped(lambda tree: smaller(tree, max(round(tree.num_nodes / 3), 2)))
        if less.num_nodes >= found[-1].num_nodes:
            return [*found, None]
        found.append(less)


class Adapting:
    """Makes the steppers of a running batch adaptive, with one measurement of paces for all of them."""

    def __init__(self, source: DrafterFactory | None) -> None:
        """Adapt the drafts of `source`; `None`: nothing is adapted."""
        self.drafts = [] if source is None else drafts_of(source)
        self.pace = Pace([1 if draft is None else draft.num_nodes for draft in self.drafts])

    def __call__(self, stepper: Stepper) -> Stepper:
        """Return `stepper`, or one that adapts its drafts, if its texts do not depend on them."""
        adapts = self.drafts and stepper.rule.keeps_texts and not isinstance(stepper, CompiledStepper)
        return AdaptiveStepper(stepper, self.drafts, self.pace) if adapts else stepper


class AdaptiveStepper(Stepper):
    """Decodes each step with one of several drafts or with none."""

    def __init__(self, stepper: Stepper, drafts: Sequence[DrafterFactory | None], pace: Pace) -> None:
        """Decode the texts of `stepper`, which drafts with the first of the `drafts`; `None` is plain decoding."""
        super().__init__(stepper.session, stepper.drafter, stepper.rule)
        device = stepper.session.backbone.device
        self.none, self.drafts, self.pace = NoDraft(device), drafts, pace
        self.drafters: dict[int, Drafter] = {0: stepper.drafter}  # those that were used, by the index of their draft
        # On a CPU, other programs take wall time. Work on a GPU takes no time of the thread, which waits for it.
        self.clock = thread_time if device.type == "cpu" else perf_counter
        self.unread: dict[int, list[Tensor]] = {}
        """Per row: hidden states [1, H] of its last tokens that the caches of the heads lack."""

    def step(self, timer: Timer) -> StepOutcome:
        texts = len(self.rows)
        start, chosen = self.clock(), self.pace.choose(texts)
        factory = self.drafts[chosen]
        if factory is None:
            outcome = self._plain_step(timer)
        else:
            self._fill_caches()
            if chosen not in self.drafters:
                self.drafters[chosen] = factory.start(self.session)
            self.drafter = self.drafters[chosen]
            outcome = super().step(timer)
        self.pace.add(texts, chosen, self.clock() - start, sum(outcome.lengths))
        return outcome

    def _plain_step(self, timer: Timer) -> StepOutcome:
        self.drafter, state = self.none, self.state
        if state.heads_cache is None:
            return super().step(timer)
        if any(len(waiting) >= MOST_UNREAD for waiting in self.unread.values()):
            self._fill_caches()
        cache, before = state.heads_cache, state.hidden
        state.heads_cache = None
        try:
            outcome = super().step(timer)
        finally:
            state.heads_cache = cache
        for row, hidden in zip(self.rows, state.hidden.split(1), strict=True):
            self.unread.setdefault(row, []).append(hidden)
        state.hidden = before
        return outcome

    def _fill_caches(self) -> None:
        """Let the caches of the heads read what plain steps have written."""
        state, sequences, cache = self.state, self.session.sequences, self.state.heads_cache
        if cache is None or not self.unread:
            return
        nothing = next(iter(self.unread.values()))[0][:0]
        hidden = [torch.cat([nothing, *self.unread.get(row, ())]) for row in self.rows]
        lengths = list(map(len, hidden))
        ids = [
            torch.tensor(sequences.tail(row, sequences.lengths[row] - 1 - length)[:length], dtype=torch.long)
            for row, length in zip(self.rows, lengths, strict=True)
        ]
        padded, counts = pad_sequence(ids, batch_first=True), on_device(lengths, state.root.device)
        read = cache.path(state.hidden, pad_sequence(hidden, batch_first=True), padded.to(state.root.device), counts)
        cache.count(lengths)
        has_read = counts.to(read.device)[:, None] > 0
        state.hidden = torch.where(has_read, read, state.hidden)
        self.unread.clear()

    def select(self, left: Sequence[int]) -> None:
        super().select(left)
        self.unread = {row: self.unread[row] for row in self.rows if row in self.unread}

    def join(self, other: Stepper, places: Sequence[int]) -> None:
        for drafter in self.drafters.values():
            forget(drafter, places)
        super().join(other, places)
