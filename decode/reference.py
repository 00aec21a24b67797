"""Plain autoregressive decoding: one token per forward, without tree or draft.

Plain decoding is the baseline for decoding with heads. It shares the rows, the target and the cache with tree decoding,
so a difference in text or time comes from the tree. Plain and tree decoding are tested against transformers' own
`generate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.loop import StepOutcome, Timer
from decode.masks import TreeMasks
from decode.sequences import Sequences
from decode.session import Session
from decode.topology import Topology
from decode.verify import reread
from medusa.backbone import Backbone, Readout
from medusa.tree import Tree


class PlainStepper:
    """Decodes one token per row and step, without a draft (a `decode.loop.Stepper`)."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.forward = PlainForward(session.backbone, session.verifier.cache, session.sequences)

    def start(self) -> tuple[list[int], list[int]]:
        frontier = self.session.prefill()
        self.rows, self.roots = frontier.rows, frontier.root
        self.root_only = torch.zeros_like(self.roots)[:, None]  # every path
        return self.rows, self.roots.tolist()

    def step(self, timer: Timer) -> StepOutcome:
        session, rows = self.session, self.rows
        readout = self.forward(self.roots[:, None])
        timer.lap("verify")
        self.roots = session.target.next(rows, session.sequences, readout.logits[:, -1]).to(session.backbone.device)
        roots = self.roots.tolist()
        timer.lap("accept")
        path, lengths = self.root_only[: len(rows)], [1] * len(rows)
        session.verifier.commit(path, lengths)
        session.keep(readout.hidden, path, lengths, rows)
        timer.lap("compact")
        return StepOutcome(lengths, roots, ids=[[]] * len(rows))

    def keep(self, left: list[int]) -> None:
        self.session.select(left)
        self.roots, self.rows = self.roots[left], [self.rows[place] for place in left]

    def close(self) -> None:
        """Do nothing: the session's memory is freed with the session."""


class PlainForward:
    """The forward of plain decoding: one model reads one token per row, on top of its cache."""

    def __init__(self, backbone: Backbone, cache: TreeCache, sequences: Sequences) -> None:
        self.backbone, self.cache, self.sequences = backbone, cache, sequences
        self.masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
        self.topology = Topology.of(Tree.chain(0).to(backbone.device))

    def __call__(self, ids: Tensor) -> Readout:
        """Read the tokens `ids` [B, 1]; returns hidden states [B, 1, H] and logits [B, 1, V] after them."""
        reread(self.backbone, self.cache, self.sequences)
        lengths = self.cache.lengths
        positions = torch.tensor(lengths, device=ids.device)[:, None]
        # Rows of one length need no mask: everything in the cache comes before them.
        mask = None if self.cache.is_even else self.masks(lengths, self.topology)
        return self.backbone.forward(ids, self.cache, position_ids=positions, attention_mask=mask)
