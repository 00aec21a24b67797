"""Decisions of compiled steps (`decode.compiled.sampling`): many draws on one draft and the logits after its nodes.

Shapes: R draws at a time, N nodes of a draft, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from decode.accept import pack
from decode.compiled import region
from decode.compiled.sampling import UNDECIDED, Kind, Sampler
from decode.draft import Draft
from decode.rules import AcceptanceRule
from decode.sequences import Sequences
from decode.session import Session
from decode.target import Target, truncated


class CompiledDecisions:
    """Samples the ends of steps by compiled code, which all prompts with one tree and kind of sampling share."""

    def __init__(self, random: Generator) -> None:
        """Draw the seeds of texts from `random`, on the backbone's device."""
        self.random, self.kept = random, list[Decisions]()

    def begin(
        self, rule: AcceptanceRule, session: Session, draft: Draft, logits: Tensor, at_once: int
    ) -> Callable[[int], Tensor]:
        """Make a function that samples up to `at_once` decisions by `rule` on a `draft`, and returns what `pack` does.

        `logits` [N, V] are those after the draft's nodes in the only text of `session`."""
        target = session.target
        if rule.kind.truncates:
            target = Target([truncated(target.of_rows[0], rule)])
        kind, shape = Kind.of(target, rule, logits.shape[1]), (at_once, *logits.shape)
        found = next((one for one in self.kept if (one.sampler.kind, one.shape) == (kind, shape)), None)
        if found is None:
            self.kept.append(found := Decisions(kind, target, draft, shape))
        found.begin(target, session.sequences, draft, logits)
        return partial(found.take, self.random)


class Decisions:
    """The end of a compiled step, in which R copies of a text with different seeds decide on one draft."""

    def __init__(self, kind: Kind, target: Target, draft: Draft, shape: tuple[int, int, int]) -> None:
        """Compile decisions of this `kind`, of `shape` (R, N, V), on drafts like `draft`."""
        self.shape = rows, _, vocab = shape
        how = draft.topology.max_depth, vocab, draft.ids.device
        self.text, self.sampler = Sampler(kind, target, 1, *how), Sampler(kind, target, rows, *how)
        self.filled = torch.zeros(rows, dtype=torch.long, device=draft.ids.device)
        self.compiled = region.compiled(self._step, {"inplace_buffers": False})

    def begin(self, target: Target, sequences: Sequences, draft: Draft, logits: Tensor) -> None:
        self.text.begin(target, sequences)
        self.sampler.undecided.zero_()
        self.sampler.numbers.copy_(self.text.numbers)
        self.filled.fill_(sequences.lengths[0] - 1)  # the root is written, and not read yet
        self.draft, self.logits = draft, logits

    def take(self, random: Generator, draws: int) -> Tensor:
        self.sampler.seen.copy_(self.text.seen)
        self.sampler.seeds.random_(2**32, generator=random)
        packed = self.compiled()
        if (packed[:, 1] == UNDECIDED).any():
            packed[:, 1] = self.sampler.finish(packed[:, 1])
        return packed[:draws]

    def _step(self) -> Tensor:
        draft = Draft(self.draft.ids.expand(self.shape[0], -1), self.draft.topology)
        return pack(draft, self.sampler.decide(draft, self.logits.expand(self.shape), self.filled))
