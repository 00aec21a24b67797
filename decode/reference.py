"""Plain autoregressive decoding: one token per forward, without tree or draft.

It is the baseline for decoding with heads. It shares the rows, the target and the cache with tree decoding, so a
difference in text or time comes from the tree. Both are tested against transformers' own `generate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.loop import StepOutcome, Stepper, Timer
from decode.masks import TreeMasks
from decode.session import Session
from decode.topology import Topology
from decode.verify import reread
from medusa.backbone import Readout
from medusa.tree import Tree


class PlainStepper(Stepper):
    """Decodes one token per row and step, without a draft."""

    def __init__(self, session: Session) -> None:
        self.session, self.cache, backbone = session, session.verifier.cache, session.backbone
        self.masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
        self.topology = Topology.of(Tree.chain(0).to(backbone.device))

    def start(self) -> tuple[list[int], list[int]]:
        frontier = self.session.prefill()
        self.rows, self.roots = frontier.rows, frontier.root
        self.root_only = torch.zeros_like(self.roots)[:, None]  # every path
        return self.rows, self.roots.tolist()

    def step(self, timer: Timer) -> StepOutcome:
        session, rows = self.session, self.rows
        readout = self._read(self.roots[:, None])
        timer.lap("verify")
        self.roots = session.target.next(rows, session.sequences, readout.logits[:, -1]).to(session.backbone.device)
        roots = self.roots.tolist()
        timer.lap("accept")
        path, lengths = self.root_only[: len(rows)], [1] * len(rows)
        session.verifier.commit(path, lengths)
        session.keep(readout.hidden, path, lengths, rows)
        timer.lap("compact")
        return StepOutcome(lengths, roots, ids=[[]] * len(rows))

    def _read(self, ids: Tensor) -> Readout:
        """Read the tokens `ids` [B, 1]; returns hidden states [B, 1, H] and logits [B, 1, V] after them."""
        reread(self.session.backbone, self.cache, self.session.sequences)
        lengths = self.cache.lengths
        positions = torch.tensor(lengths, device=ids.device)[:, None]
        # Rows of one length need no mask: everything in the cache comes before them.
        mask = None if self.cache.is_even else self.masks(lengths, self.topology)
        return self.session.backbone.forward(ids, self.cache, position_ids=positions, attention_mask=mask)

    def keep(self, left: list[int]) -> None:
        self.session.select(left)
        self.roots, self.rows = self.roots[left], [self.rows[place] for place in left]
