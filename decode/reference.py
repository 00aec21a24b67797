"""Plain autoregressive decoding: one token per forward, without tree or draft.

Plain decoding is the baseline for decoding with heads. It shares texts, target and verifier with tree decoding, so a
difference in text or time comes from the tree. Plain and tree decoding are tested against transformers' own `generate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.draft import Draft
from decode.loop import StepOutcome, Stepper, Timer
from decode.ops.transfer import on_device
from decode.session import Session
from decode.topology import Topology
from medusa.tree import Tree


class PlainStepper(Stepper):
    """The stepper of plain decoding, where each step writes one token per text, without a draft."""

    hidden: Tensor  # [B, 1, H] of the last step's roots

    def __init__(self, session: Session) -> None:
        self.session = session
        self.topology = Topology.of(Tree.chain(0).to(session.backbone.device))

    def start(self) -> tuple[list[int], list[int]]:
        frontier = self.session.prefill()
        self.rows, self.roots = frontier.rows, frontier.root
        return self.rows, self.roots.tolist()

    def step(self, timer: Timer) -> StepOutcome:
        session, rows = self.session, self.rows
        readout = session.verifier.read(Draft(self.roots[:, None], self.topology))
        timer.lap("verify")
        self.hidden = readout.hidden
        self.roots = session.target.next(rows, session.sequences, readout.logits[:, -1]).to(session.backbone.device)
        roots = self.roots.tolist()
        timer.lap("accept")
        path, lengths = torch.zeros_like(self.roots)[:, None], [1] * len(rows)  # every path is the root alone
        session.verifier.commit(path, lengths)
        session.keep(readout.hidden, path, lengths, rows)
        timer.lap("compact")
        return StepOutcome(lengths, roots, ids=[[]] * len(rows))

    def keep(self, left: list[int]) -> None:
        self.session.select(left)
        self.roots, self.rows = self.roots[on_device(left, self.roots.device)], [self.rows[place] for place in left]

    def join(self, other: PlainStepper, places: list[int]) -> None:
        """Take over the texts of `other`, which has just started, as the rows `places`; see `Session.join`."""
        self.session.join(other.session, places, self.rows)
        self.roots, self.rows = torch.cat([self.roots, other.roots]), [*self.rows, *places]
