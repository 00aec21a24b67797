"""Decoding with Markov heads, step by step, with what each step's drafter looked up: for pictures and notebooks.

    for step in trellis_steps(model, heads, input_ids, tree="dynamic:16", max_new_tokens=64):
        print(step.candidates, step.tables.shape, step.draft.parents, step.draft.accepted)

The drafter is the one that all commands use; a subclass only keeps the trellis that it computes.

Shapes: K heads (as many as the tree is deep), M candidates of a head, N nodes of a draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import DraftRecord, Frontier
from decode.drafters.layouts import DynamicTree, Layout, TreeLike, resolve_tree
from decode.drafters.trained_heads import TrainedHeads
from decode.drafters.trellis import Trellis, TrellisDrafter
from decode.generation import steps
from decode.session import Session
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.markov import MarkovHeads


class TrellisStep(NamedTuple):
    """One decoding step of one text: its candidates, the tables of pairs, and the tree that grew from them."""

    text: list[int]  # the token ids before the root, prompt included
    candidates: list[list[int]]  # [K][M] the token ids of each head's candidates, the most probable first
    first: Tensor  # [M] how probable each candidate of the first head is after the root
    tables: Tensor  # [K - 1, M, M] how probable each candidate of a head (last) is after each one of the head before it
    draft: DraftRecord  # the tree that was verified, and the nodes that were accepted

    @property
    def places(self) -> list[tuple[int, int]]:
        """Return depth and index of each node of the draft in `candidates`, (depth, 0) to (depth, M - 1); (0, 0) first.

        Two nodes with the same place have the same token at the same depth, after different paths."""
        found = [(0, 0)]
        for token, parent in list(zip(self.draft.ids, self.draft.parents, strict=True))[1:]:
            depth = found[parent][0] + 1
            found.append((depth, self.candidates[depth - 1].index(token)))
        return found


class _Recorder(TrellisDrafter):
    """The drafter of Markov heads, which keeps the trellis of the last step."""

    last: Trellis

    def begin(self, frontier: Frontier) -> Trellis:
        self.last = super().begin(frontier)
        return self.last


class _Recorders(TrainedHeads):
    """A factory that keeps the drafter that it made."""

    def __init__(self, heads: MarkovHeads, tree: Layout) -> None:
        super().__init__(heads, tree)
        self.markov = heads

    def start(self, session: Session, drawn: bool = False) -> _Recorder:
        self.drafter = _Recorder(self.markov, session.backbone, self.tree, session.target if drawn else None)
        return self.drafter


def trellis_steps(
    model: PreTrainedModel, heads: MedusaHeads, input_ids: Tensor, *, tree: TreeLike = None, **kwargs: Any
) -> Iterator[TrellisStep]:
    """Decode one text, prompt [1, T], as `decode.steps` does, and yield the trellis and the draft of each step.

    `tree` and `kwargs` are those of `decode.steps`. Probabilities are shares among the M candidates, at the heads'
    temperatures if the tree is dynamic. Raise a `RequestError` if the heads are of another kind than `markov`, there is
    more than one prompt, the tree is a root alone, or `decode.steps` does."""
    if not isinstance(heads, MarkovHeads):
        raise RequestError(f"the heads are of kind {heads.config.kind}; only those of kind markov draft by a trellis")
    if len(input_ids) != 1:
        raise RequestError(f"there are {len(input_ids)} prompts; give one")
    layout = resolve_tree(tree, heads)
    if layout.max_depth == 0:
        raise RequestError("the tree is a root alone; a trellis needs a depth of at least 1")
    factory, text = _Recorders(heads, layout), input_ids[0].tolist()

    def shares(scores: Tensor, head: int) -> Tensor:
        log_p = layout.log_confidences(scores, head) if isinstance(layout, DynamicTree) else scores.log_softmax(-1)
        return log_p.exp().cpu()

    for step in steps(model, None, input_ids, drafter=factory, keep_drafts=True, **kwargs):
        for draft in step.drafts.values():
            ids, first, tables, _ = factory.drafter.last
            after = [shares(table[0], head) for head, table in enumerate(tables, 1)]
            pairs = torch.stack(after) if after else tables[:, 0].float().cpu()
            yield TrellisStep(list(text), ids[:, 0].tolist(), shares(first[0, 0], 0), pairs, draft)
        text += step.ids[0]
