"""Plain autoregressive decoding: what decoding with heads must equal, and the baseline it is measured against.

One token a forward, no tree, no draft. It shares the rows, the sampler and the cache with the tree loop, so a
difference in text or time is the tree's; transformers' own `generate` is the third party that both are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.compiled.regions import Compiled, NoDraft
from decode.loop import Acceptor, Session, Step
from decode.request import require_amateur
from decode.sequences import Request, Sequences
from decode.strategies.contrastive import Amateur
from decode.timers import Timer
from decode.topology import Topology
from decode.verify import TreeMasks, reread
from medusa.backbone import Backbone, Readout
from medusa.tree import Tree


def plain_session(
    model: PreTrainedModel,
    requests: Sequence[Request],
    clock: Timer | None = None,
    keep_hidden: bool = False,
    compile: bool = False,
    amateur: Amateur | None = None,
) -> tuple[Session, Iterator[Step]]:
    """A session that decodes without heads, and its steps; with `compile` compiled ones (`decode.compiled.regions`).

    Raises:
        RequestError: an amateur that does not fit."""
    if amateur is not None:
        require_amateur(amateur, model, requests, compile)
    session = Session(model, requests, slack=int(compile), keep_hidden=keep_hidden, amateur=amateur)
    if compile:
        device = session.backbone.device
        rule = Acceptor("rejection" if requests[0].do_sample else "greedy")
        return session, Compiled(session, rule, Tree.chain(0), None, lambda: NoDraft(device)).run(clock or Timer())
    return session, _run(session, clock or Timer())


@torch.inference_mode()
def _run(session: Session, clock: Timer) -> Iterator[Step]:
    backbone, sequences, beside = session.backbone, session.sequences, session.beside
    tokens = session.prefill().root
    rows = list(range(len(sequences)))
    alone = PlainForward(backbone, session.cache, sequences)
    amateur = None if beside is None else PlainForward(beside.backbone, beside.cache, sequences)
    root_only = torch.zeros(len(rows), 1, dtype=torch.long, device=backbone.device)
    clock.start()
    while rows:
        step = Step()
        for row, token in zip(rows, tokens.tolist(), strict=True):
            written = sequences.extend(row, [token])
            if written:
                step.ids[row], step.lengths[row] = written, 1
        left = [index for index, row in enumerate(rows) if sequences.finish_reason[row] is None]
        if left and len(left) < len(rows):
            session.select(left)
            tokens = tokens[left]
        rows = [rows[index] for index in left]
        if rows:
            clock.lap("other")
            readout = alone(tokens[:, None])
            logits = readout.logits[:, -1]
            if beside is not None and amateur is not None:
                logits = beside.contrast(logits, amateur(tokens[:, None]).logits[:, -1])
            clock.lap("verify")
            tokens = session.target.next(rows, sequences, logits).to(backbone.device)
            clock.lap("accept")
            session.commit(root_only[: len(rows)], [1] * len(rows))
            session.keep(readout.hidden, root_only[: len(rows)], [1] * len(rows), rows)
            clock.lap("compact")
        if step.ids:
            yield step
        clock.start()


class PlainForward:
    """One model, one token a row, on top of its cache."""

    def __init__(self, backbone: Backbone, cache: TreeCache, sequences: Sequences) -> None:
        self.backbone, self.cache, self.sequences = backbone, cache, sequences
        self.masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
        self.topology = Topology.of(Tree.chain(0).to(backbone.device))

    def __call__(self, ids: Tensor) -> Readout:
        """ids [B, 1] -> hidden [B, 1, H] and logits [B, 1, V]."""
        reread(self.backbone, self.cache, self.sequences)
        lengths = self.cache.lengths
        positions = torch.tensor(lengths, device=ids.device)[:, None]
        # One row needs no mask: everything in the cache is before it. Rows of different length do.
        mask = None if self.cache.is_even else self.masks(lengths, self.topology)
        return self.backbone.forward(ids, self.cache, position_ids=positions, attention_mask=mask)
