"""The decoding loop: every step proposes a draft, verifies it, accepts some of its nodes and compacts the KV cache.

Eager, plain and compiled decoding share `run`, the loop over the decoding steps of a batch. The root of a draft is the
token that is already decided, but not yet read by the backbone.

Shapes: B rows, R of them whose walk has not ended, N nodes of a draft, D its depth, H hidden size, V vocabulary."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from decode.accept import (
    Acceptance,
    Accepted,
    HostAcceptance,
    Passes,
    Truncation,
    accept_greedy,
    accept_greedy_on_host,
    accept_longest,
    accept_walk,
    among_best,
    at_end,
    near_best,
    pack,
    typical,
)
from decode.draft import Draft, Drafter, DraftRecord, Frontier, forget
from decode.ops.draws import NO_TOKEN, RewoundDraws, RowDraws
from decode.ops.fast_topk import most_probable, most_probable_on_host
from decode.ops.transfer import host_waits, on_device
from decode.rejection import accept_sampled
from decode.sequences import Sequences
from decode.settings import AcceptanceRule
from medusa.errors import RunError

if TYPE_CHECKING:
    from decode.session import Session
    from medusa.backbone import Readout


NOT_DEFINED = "the model gives probabilities that are NaN; load it in another dtype, such as float32"
PART = 1 << 24
"""Scores of nodes that a lossy rule reads at once, which limits the memory that it takes."""


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


class Stepper(Protocol):
    """One way to decode the rows of a batch step by step: eager, plain or compiled."""

    session: Session

    def start(self) -> tuple[list[int], list[int]]:
        """Read the prompts into the caches; returns the rows to decode (session indices), and each row's first root."""

    def step(self, timer: Timer) -> StepOutcome:
        """Decode one step of all unfinished rows."""

    def keep(self, left: list[int]) -> None:
        """Keep only the rows at the indices `left` of the batch, because the other rows have ended."""

    def close(self) -> None:
        """Give back what was borrowed, such as compiled steps; called when the decoding run ends or is interrupted."""
        return


class Timer:
    """The default timer, which measures nothing; its subclass `decode.bench.benchmark.StageTimer` times the stages."""

    def start(self) -> None:
        """Do nothing when a decoding step starts; a subclass notes the time."""

    def lap(self, stage: str) -> None:
        """Do nothing when a stage of the decoding step ends; a subclass notes the time."""


@torch.inference_mode()
def run(sequences: Sequences, stepper: Stepper, timer: Timer) -> Generator[Step, None, None]:
    """Decode until every row (text) has ended, and yield a `Step` for each decoding step; the prefill is no step."""
    try:
        rows, roots = stepper.start()
        while rows:
            require_defined(roots)
            step, rows, roots = advance(sequences, stepper, rows, roots, timer)
            if step.ids:
                yield step
    finally:
        stepper.close()


def require_defined(roots: list[int]) -> None:
    """Raise a `RunError` if no next token of a text could be drawn, as `model.generate` raises a `RuntimeError`."""
    if NO_TOKEN in roots:
        raise RunError(NOT_DEFINED)


def advance(
    sequences: Sequences, stepper: Stepper, rows: list[int], roots: list[int], timer: Timer
) -> tuple[Step, list[int], list[int]]:
    """Decode one step of the texts `rows`, whose next tokens `roots` are already decided; ended texts leave.

    Return the step, the rows that are still unfinished, and their next roots."""
    timer.start()
    step = Step()
    for row, root in zip(rows, roots, strict=True):
        written = sequences.extend(row, [root])
        if written:
            step.ids[row], step.lengths[row] = written, 1
    left = _unfinished(sequences, stepper, rows)
    if len(left) < len(rows):
        rows = [rows[place] for place in left]
    if not rows:
        return step, [], []
    timer.lap("other")
    outcome = stepper.step(timer)
    for row, ids, length in zip(rows, outcome.ids, outcome.lengths, strict=True):
        step.ids[row] += sequences.extend(row, ids[1:length])
        step.lengths[row] = length
    if outcome.drafts:
        step.drafts = dict(zip(rows, outcome.drafts, strict=True))
    left = _unfinished(sequences, stepper, rows)
    timer.lap("other")
    if len(left) == len(rows):
        return step, rows, outcome.roots
    return step, [rows[place] for place in left], [outcome.roots[place] for place in left]


def _unfinished(sequences: Sequences, stepper: Stepper, rows: list[int]) -> list[int]:
    """Return the places in `rows` of unfinished rows. The stepper drops the others, but never all of its rows."""
    left = [place for place, row in enumerate(rows) if sequences.finish_reason[row] is None]
    if 0 < len(left) < len(rows):
        stepper.keep(left)
    return left


class TreeStepper(Stepper):
    """Eager tree decoding: a step proposes a draft, verifies it, accepts some of its nodes and compacts the cache."""

    def __init__(self, session: Session, drafter: Drafter, acceptor: Acceptor, keep_drafts: bool = False) -> None:
        """Make a stepper. `keep_drafts`: every step also copies its drafts to the host, for `Step.drafts`."""
        self.session, self.drafter, self.acceptor = session, drafter, acceptor
        self.passes, self.keep_drafts = acceptor.passes, keep_drafts

    def start(self) -> tuple[list[int], list[int]]:
        # Typical acceptance decides on every root by argmax, and so also on the first one.
        self.frontier = self.session.prefill(most_probable_first=self.acceptor.rule == "typical")
        self._settle()
        return self.frontier.rows, self.frontier.root.tolist()

    def _settle(self) -> None:
        """Find out how steps decide, which only other texts can change."""
        target, device = self.session.target, self.session.backbone.device
        self.lazy = not (target.is_pure and host_waits(device))
        """Whether walks stop where they end (`decode.accept.TreeWalk`); if not, a step waits for the device once."""
        # In a model spread over devices, the logits can be elsewhere.
        logits_on_host = device.type == "cpu" and self.session.backbone.head_weight.is_cpu
        self.on_host = logits_on_host and target.is_argmax and self.passes is None and self.lazy

    def step(self, timer: Timer) -> StepOutcome:
        with self.session.verifier.linear(2 * len(self.frontier.rows)):  # for shared LM heads
            draft = self.drafter.propose(self.frontier)
        timer.lap("propose")
        readout = self.session.verifier(draft)
        timer.lap("verify")
        accepted, outcome = self.decide(draft, readout)
        if self.keep_drafts:
            outcome = outcome._replace(drafts=draft.records(accepted.path, outcome.lengths))
        timer.lap("accept")
        self.frontier = self.compact(draft, readout, accepted, outcome.lengths)
        timer.lap("compact")
        return outcome

    def decide(self, draft: Draft, readout: Readout) -> tuple[Accepted, StepOutcome]:
        """Accept nodes of the draft (`accept`), and copy the outcome to the host."""
        if self.on_host:
            depth_limit = self.session.verifier.depth_limit(draft)
            found = accept_greedy_on_host(draft, most_probable_on_host(readout.logits), depth_limit)
            return found, StepOutcome([len(path) for path in found.paths], found.next_roots, found.ids)
        draws = self.session.target.draws.of(self.frontier.rows)
        if not self.lazy:
            draws = RewoundDraws(draws.generators, draft.ids.device)
        accepted = self.accept(draft, readout, draws)
        outcome = unpack(pack(draft, accepted).tolist())  # the one moment at which most steps wait for the device
        draws.keep(outcome.lengths)
        return accepted, outcome

    def accept(self, draft: Draft, readout: Readout, draws: RowDraws) -> Acceptance:
        """Decide which nodes of the draft are accepted, by the acceptance rule; `draws` are those of its rows."""
        session, logits, passes = self.session, readout.logits, self.passes
        target, depth_limit = session.target, session.verifier.depth_limit(draft)
        if target.is_argmax and passes is None:
            return accept_greedy(draft, most_probable(logits).to(draft.ids.device), depth_limit)
        if passes is not None:
            return accept_longest(draft, self._scores_of_nodes(draft, logits), passes, depth_limit)
        scores = partial(self._scores, draft, logits)
        if draft.proposal is not None:
            return accept_sampled(draft, scores, draws, depth_limit, self.lazy)
        return accept_walk(draft, scores, partial(target.decide, draws), depth_limit, self.lazy)

    def _scores(self, draft: Draft, logits: Tensor, rows: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Return the target's scores [R, V] after node `nodes[i]` of row `rows[i]`, and their indices 0 to R - 1."""
        target, sequences = self.session.target, self.session.sequences
        at = logits[rows.to(logits.device), nodes.to(logits.device)]
        index = torch.arange(len(nodes), device=nodes.device)
        if target.is_textless:
            return target.scores_of(at, nodes.device), index
        # The root is written already. A row whose walk ended above `depth` gets other tokens, which changes nothing.
        below = draft.topology.at(draft.topology.paths, rows, nodes)[:, 1 : depth + 1].clamp_min(0)
        tokens, found = draft.ids[rows[:, None], below], []
        for place, row in enumerate(rows.tolist() if self.lazy else range(len(rows))):
            row = self.frontier.rows[row]
            found.append(target.scores(row, sequences.prefix(row, tokens[place]), at[place]))
        return torch.cat(found), index

    def _scores_of_nodes(self, draft: Draft, logits: Tensor) -> Iterator[Tensor]:
        """Yield the target's scores [b, N, V] after all nodes of the draft, for b rows at a time."""
        target, sequences, device = self.session.target, self.session.sequences, draft.ids.device
        if target.is_textless:
            for part in logits.split(max(1, PART // logits[0].numel())):
                yield target.scores_of(part.flatten(0, 1), device).view_as(part)
            return
        lines = [[[n for n in line if n >= 0] for line in lines] for lines in draft.topology.paths.tolist()]
        for place, row in enumerate(self.frontier.rows):
            paths = lines[0 if draft.topology.is_shared else place]
            prefix = sequences.prefix(row)
            yield target.scores_of_nodes(row, prefix, draft.ids[place], paths, logits[place])[None]

    def compact(self, draft: Draft, readout: Readout, accepted: Accepted, lengths: list[int]) -> Frontier:
        """Keep the first `lengths[b]` nodes of accepted path b in the caches; returns the next step's `Frontier`."""
        session, rows = self.session, self.frontier.rows
        if isinstance(accepted, HostAcceptance):
            session.verifier.commit(accepted.paths, lengths)
        else:  # in a chain no node moves
            session.verifier.commit(accepted.path if draft.topology.max_children > 1 else None, lengths)
        if session.kept_hidden is not None:
            session.keep(readout.hidden, accepted.path, lengths, rows)
        if session.heads_cache is None:
            return session.frontier(accepted.next_root, at_end(readout.hidden, accepted), rows)
        path = accepted.path[:, : max(lengths)].clamp_min(0)
        on_path = path.to(readout.hidden.device)[:, :, None].expand(-1, -1, readout.hidden.shape[-1])
        hidden = session.heads_cache.path(
            self.frontier.hidden, readout.hidden.gather(1, on_path), draft.ids.gather(1, path), lengths
        )
        return session.frontier(accepted.next_root, hidden, rows)

    def keep(self, left: list[int]) -> None:
        self.session.select(left)
        root, hidden, rows, _ = self.frontier
        index = on_device(left, root.device)
        rows = [rows[place] for place in left]
        self.frontier = self.session.frontier(root[index], hidden[index.to(hidden.device)], rows)

    def join(self, other: TreeStepper, places: list[int]) -> None:
        """Take over the texts of `other`, which has just started, as the rows `places`; see `Session.join`."""
        mine, new = self.frontier, other.frontier
        self.session.join(other.session, places, mine.rows)
        root, hidden = torch.cat([mine.root, new.root]), torch.cat([mine.hidden, new.hidden])
        self.frontier = self.session.frontier(root, hidden, [*mine.rows, *places])
        self._settle()
        forget(self.drafter, places)


class Acceptor(AcceptanceRule):
    """The settings of an acceptance rule, and how to apply them: a test of drafted tokens, or a truncated target."""

    @property
    def passes(self) -> Passes | None:
        """For lossy rules that accept the longest path: the function that tests drafted tokens; else `None`."""
        if self.rule == "typical":
            return lambda scores: typical(scores.softmax(-1), self.epsilon, self.delta)
        if self.limit is None:
            return None
        judge, limit = {"topk": among_best, "distance": near_best}[self.rule], self.limit
        return lambda scores: judge(scores, limit)

    @property
    def truncation(self) -> Truncation | None:
        """For the rule typical-sampled: the constants that limit the target to its typical tokens; else `None`."""
        return Truncation(self.epsilon, self.delta) if self.rule == "typical-sampled" else None


def unpack(packed: Sequence[list[int]]) -> StepOutcome:
    """Read the outcome of a decoding step from the tensor that `pack` made, given as one list per row."""
    return StepOutcome([row[0] for row in packed], [row[1] for row in packed], [row[2:] for row in packed])
