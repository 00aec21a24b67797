"""The decoding loop: runs steps (`decode.step`) until all texts have ended, and writes what they decided."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from decode.draft import Drafter, DraftRecord, forget
from decode.ops.draws import NO_TOKEN, RewoundDraws, RowDraws
from decode.ops.fast_linear import fast_linear
from decode.ops.transfer import host_waits
from decode.rules import AcceptanceRule
from decode.session import Read, Session
from decode.step import Decided, Judge, State, decode_step
from medusa.errors import RunError

NOT_DEFINED = (
    "no next token can be chosen: the options exclude every token, such as bans, a grammar or a minimal length, or the "
    "model gives probabilities that are NaN, which another dtype such as float32 may repair"
)


@dataclass
class Step:
    """What one decoding step wrote: for each row, by its index, the new tokens and their number before any cut."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    """The tokens written to each unfinished row, cut at EOS, stop string or maximum length."""
    lengths: dict[int, int] = field(default_factory=dict)
    """1 + accepted tokens, before the cut; 1 if the root already ended the text, as nothing is drafted after it."""
    drafts: dict[int, DraftRecord] = field(default_factory=dict)
    """The draft of each row with its accepted nodes, if requested; not for a root that already ended the text."""


class StepOutcome(NamedTuple):
    """What one step decided for each unfinished row (text), on the host: accepted length, next root, accepted ids."""

    lengths: list[int]  # 1 + accepted tokens
    roots: list[int]  # the root of the next step
    ids: list[list[int]]  # tokens on row b's accepted path, current root first; those after `lengths[b]` are padding
    drafts: Sequence[DraftRecord] = ()  # the draft of each row, if the stepper keeps drafts; else empty


class Timer:
    """The default timer, which measures nothing; its subclass `decode.bench.benchmark.StageTimer` times the stages."""

    def start(self) -> None:
        """Do nothing when a decoding step starts; a subclass notes the time."""

    def lap(self, stage: str) -> None:
        """Do nothing when a stage of the decoding step ends; a subclass notes the time."""


class Stepper:
    """Decodes the texts of a session, step by step. The live rows, their next tokens and their caches are here."""

    state: State  # from `start` on
    roots: list[int]  # the next token of each live row, which is decided, but not written yet
    draws: RowDraws | None = None  # of the last step, if the host can take them back

    def __init__(self, session: Session, drafter: Drafter, rule: AcceptanceRule, keep_drafts: bool = False) -> None:
        """Make a stepper. `keep_drafts`: every step also copies its drafts to the host, for `Step.drafts`."""
        self.session, self.drafter, self.rule, self.keep_drafts = session, drafter, rule, keep_drafts

    @property
    def rows(self) -> list[int]:
        """The session's index of each live row."""
        return self.state.rows

    def start(self) -> None:
        """Read the prompts into the caches, and decide on the first tokens."""
        root, hidden = self._prefill()
        self.state, self.roots = State(self.session.reader, self.session.heads_cache, root, hidden), root.tolist()
        self._settle()

    def _prefill(self, read: Read | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        # A rule that accepts the longest path decides on every root by argmax, and so also on the first one.
        return self.session.prefill(most_probable_first=not self.rule.kind.walks, read=read)

    def _settle(self) -> None:
        """Choose how steps decide. It depends on the options of the texts, so it is chosen again when texts join."""
        target, device = self.session.target, self.session.backbone.device
        # A lazy walk asks the device for each token; if all nodes can be decided at once, a step waits once.
        lazy = not (target.is_pure and host_waits(device))
        self.judge = Judge(self.rule, target, self.session.sequences, lazy)

    def step(self, timer: Timer) -> StepOutcome:
        """Decode one step of all live rows."""
        self.session.reread()
        draws = self.session.target.draws.of(self.rows)
        criteria, target = self.session.sequences.criteria, self.session.target
        if not self.judge.lazy or (target.do_sample and any(criteria[row] for row in self.rows)):
            draws = RewoundDraws(draws, self.state.root.device)
        # The context covers the draft, too, because most of its time goes to the LM head.
        with fast_linear(self.session.backbone.head_weight, 2 * len(self.rows)):
            decided = decode_step(self.state, self.drafter, partial(self.judge, draws), timer.lap)
        outcome = unpack(decided.packed.tolist())  # the one moment at which most steps wait for the device
        self.draws = draws
        self.state.count(outcome.lengths)
        return self._finished(decided, outcome)

    def rewind(self, counts: Sequence[int]) -> None:
        """Tell how many tokens of the last step each of its rows needed; draws after them are taken back."""
        if self.draws is not None:
            self.draws.rewind(counts)

    def _finished(self, decided: Decided, outcome: StepOutcome) -> StepOutcome:
        """Keep what the step decided, and the hidden states and drafts that are to be recorded."""
        self.roots, path = outcome.roots, decided.accepted.path
        self.session.record(decided.hidden, path, outcome.lengths, self.rows)
        if self.keep_drafts:
            return outcome._replace(drafts=decided.draft.records(path, outcome.lengths))
        return outcome

    def select(self, left: Sequence[int]) -> None:
        """Keep only the live rows at the places `left`, because the other texts have ended."""
        self.roots = [self.roots[place] for place in left]
        self.state.select(left)

    def takes(self, other: Stepper) -> bool:
        """Whether the texts of `other`, which has not started, can join before the next step."""
        return True

    def join(self, other: Stepper, places: Sequence[int]) -> None:
        """Take over the texts of `other`, which has just started, as the rows `places` (`Session.join`).

        `other` is used up."""
        self.session.join(other.session, places, self.rows)
        self.state.join(other.state, places)
        self.roots = [*self.roots, *other.roots]
        self._settle()
        forget(self.drafter, places)

    def close(self) -> None:
        """Give back what was borrowed, such as compiled steps; called when the decoding run ends or is interrupted."""
        return


@torch.inference_mode()
def run(stepper: Stepper, timer: Timer) -> Generator[Step, None, None]:
    """Decode until every row (text) has ended, and yield a `Step` for each decoding step; the prefill is no step."""
    try:
        stepper.start()
        while stepper.rows:
            require_defined(stepper.roots)
            step = advance(stepper, timer)
            if step.ids:
                yield step
    finally:
        stepper.close()


def require_defined(roots: Sequence[int]) -> None:
    """Raise a `RunError` if no next token of a text could be drawn, as `model.generate` raises a `RuntimeError`."""
    if NO_TOKEN in roots:
        raise RunError(NOT_DEFINED)


def advance(stepper: Stepper, timer: Timer) -> Step:
    """Decode one step of the live rows, whose next tokens are already decided; ended texts leave."""
    timer.start()
    step, sequences = Step(), stepper.session.sequences
    for row, root in zip(stepper.rows, stepper.roots, strict=True):
        written = sequences.extend(row, [root])
        if written:
            step.ids[row], step.lengths[row] = written, 1
    _drop_ended(stepper)
    if not stepper.rows:
        return step
    timer.lap("other")
    outcome, needed = stepper.step(timer), []
    for row, ids, length in zip(stepper.rows, outcome.ids, outcome.lengths, strict=True):
        written = sequences.extend(row, ids[1:length])
        step.ids[row] += written
        step.lengths[row] = length
        needed.append(length if sequences.finish_reason[row] is None else len(written))
    stepper.rewind(needed)
    if outcome.drafts:
        step.drafts = dict(zip(stepper.rows, outcome.drafts, strict=True))
    _drop_ended(stepper)
    timer.lap("other")
    return step


def _drop_ended(stepper: Stepper) -> None:
    """Drop the rows whose texts have ended; the last rows take their places, so that few rows of caches are copied."""
    reasons = stepper.session.sequences.finish_reason
    goes_on = [reasons[row] is None for row in stepper.rows]
    count = sum(goes_on)
    if count < len(goes_on):
        last = iter(place for place in reversed(range(count, len(goes_on))) if goes_on[place])
        stepper.select([place if goes_on[place] else next(last) for place in range(count)])


def unpack(packed: Sequence[list[int]]) -> StepOutcome:
    """Read the outcome of a decoding step from the tensor that `pack` made, given as one list per row."""
    return StepOutcome([row[0] for row in packed], [row[1] for row in packed], [row[2:] for row in packed])
