"""The target: the scores that a text must follow, computed from the backbone's logits by transformers' own processors.

Temperature, top-k, top-p and penalties are `LogitsProcessor`s that transformers prepared. A processor sees one row at
a time, as in plain decoding: the prompt, everything written so far, and the path down to a node.

Shapes: B rows of the batch, R of them that choose a token, M distributions (rows may share one), V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from decode.accept import Truncation, typical
from decode.ops.draws import Draws, RowDraws
from decode.ops.fast_topk import most_probable
from decode.sequences import Request, Sequences

WARPERS = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)
"""Processors that look only at scores. All others may depend on the row's text or its length."""


class Target:
    """The backbone's distribution over next tokens, after temperature and penalties; if greedy, its best token."""

    def __init__(self, requests: Sequence[Request], truncation: Truncation | None = None) -> None:
        self.processors = [request.processors for request in requests]
        self.warpers = [LogitsProcessorList(p for p in r.processors if isinstance(p, WARPERS)) for r in requests]
        self.truncation = truncation
        self.do_sample = requests[0].do_sample
        self.draws = RowDraws([request.generator for request in requests])
        config = requests[0].config
        # Per row, for every decided token in order: its scores and its raw logits [1, V], where options ask for them.
        self.kept_scores: list[list[Tensor]] | None = [[] for _ in requests] if config.output_scores else None
        self.kept_logits: list[list[Tensor]] | None = [[] for _ in requests] if config.output_logits else None
        keeps = self.kept_scores is not None or self.kept_logits is not None
        self.is_argmax = not self.do_sample and not keeps and not any(self.processors)
        """Whether one argmax over raw logits decides, so that all nodes can be decided at once."""

    def scores(self, row: int, prefix: Tensor, logits: Tensor) -> Tensor:
        """Apply the logits processors of a row to the logits [V] after its text `prefix` [1, T]; returns scores [1, V].

        Call this method once for each token that is chosen, in the order of the text: processors may keep a state
        between calls, and scores may be recorded."""
        # On the prefix's device, where generators and the processors' tensors are, whatever device the last layer has.
        raw = logits[None].to(device=prefix.device, copy=True, dtype=torch.float32)
        if self.kept_logits is not None:
            self.kept_logits[row].append(raw.clone())  # a processor may write in place
        scores = processed(self.processors[row], prefix, raw, self.truncation)
        if self.kept_scores is not None:
            self.kept_scores[row].append(scores)
        return scores

    def decide(self, draws: Draws, rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        """Decide on R tokens [R], one per row: the most probable token, or a draw from the softmax of the scores.

        Token i is for row `rows[i]` of `draws`, and its scores are `scores[index[i]]`; `scores` is [M, V]. Random draws
        are made in the order of the tokens, one per token, so a seed gives the text of `model.generate`."""
        if not self.do_sample:
            return scores.argmax(-1)[index]
        return draws.tokens(rows, scores.softmax(-1), index)

    def next(
        self, rows: Sequence[int], sequences: Sequences, logits: Tensor, most_probable_only: bool = False
    ) -> Tensor:
        """Decide on the next token of each of B `rows` [B], from the logits [B, V] after their texts.

        With `most_probable_only`, the token is never drawn at random."""
        if self.is_argmax:
            return most_probable(logits)
        scores = torch.cat([self.scores(row, sequences.prefix(row), logits[i]) for i, row in enumerate(rows)])
        if most_probable_only:
            return scores.argmax(-1)
        everyone = torch.arange(len(rows), device=scores.device)
        return self.decide(self.draws.of(rows), everyone, scores, everyone)

    def draft_probabilities(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """Apply the target's temperature, top-k and top-p to a drafter's logits [B, nodes, V]; returns q.

        Draft tokens are drawn from q, which affects how many tokens are accepted, but not the distribution of the text.
        Penalties depend on tokens that are not drawn yet, so q is computed without them."""
        ids = torch.zeros(logits.shape[1], 1, dtype=torch.long, device=logits.device)  # `WARPERS` read none
        warped = [processed(self.warpers[row], ids, logits[i].float()) for i, row in enumerate(rows)]
        return torch.stack(warped).softmax(-1)


def processed(
    processors: LogitsProcessorList, ids: Tensor, scores: Tensor, truncation: Truncation | None = None
) -> Tensor:
    """Process scores [X, V] after `ids` [X, T]; `truncation` sets tokens that typical acceptance rejects to -inf."""
    scores = cast(Tensor, processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores)))
    if truncation is None:
        return scores
    return scores.masked_fill(~typical(scores.softmax(-1), *truncation), -torch.inf)
