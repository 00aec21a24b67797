"""The target: the scores that a text must follow, computed from the backbone's logits by transformers' own processors.

Temperature, top-k, top-p and penalties are `LogitsProcessor`s that transformers prepared. A processor that reads the
text sees one row at a time, as in plain decoding: the prompt, everything written so far, and the path down to a node.
Processors that look only at scores see many rows and nodes at once, if all rows have the same.

Shapes: B rows of the batch, R of them that choose a token, X positions, N nodes of a draft, T tokens of a text,
M distributions (rows may share one), V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from decode.ops.draws import Draws, best_of
from decode.ops.fast_topk import most_probable
from decode.ops.transfer import on_device
from decode.rules import AcceptanceRule
from decode.sequences import Request, Sequences
from medusa.errors import RequestError

WARPERS = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)
"""Processors of transformers that look only at scores. All others, and subclasses of a user, may read the text."""
READERS = (
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
)
"""Processors of transformers that depend on the text that they get, and on nothing else: no call changes the next."""

STATEFUL = (
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
"""Processors of transformers that keep a state, so that they must be called once for each token of a text, in order."""


class Passing(LogitsProcessor):
    """Leaves only the tokens that pass a lossy rule, so that a walk samples from these."""

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return cast(torch.FloatTensor, scores.masked_fill(~self.rule.passes(scores), -torch.inf))


class MostProbable(LogitsProcessor):
    """Leaves only the most probable token, so that a draw is the choice of greedy decoding."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        kept, best = torch.full_like(scores, -torch.inf), scores.max(-1, keepdim=True)
        only = torch.zeros_like(best.values).masked_fill(best.values == -torch.inf, -torch.inf)  # all are excluded
        return cast(torch.FloatTensor, kept.scatter_(-1, best.indices, only))


SCORES_ONLY = (*WARPERS, Passing)
"""All processors that look only at scores."""


def truncated(request: Request, rule: AcceptanceRule) -> Request:
    """Let a request's text be sampled only from the tokens that pass a lossy rule."""
    return request._replace(processors=LogitsProcessorList([*request.processors, Passing(rule)]))


class Target:
    """The backbone's distribution over next tokens, after temperature and penalties; if greedy, its best token."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.of_rows = list(requests)
        config = requests[0].config
        # Per row, for every decided token in order: its scores and its raw logits [1, V], where options ask for them.
        self.kept_scores: list[list[Tensor]] | None = [[] for _ in requests] if config.output_scores else None
        self.kept_logits: list[list[Tensor]] | None = [[] for _ in requests] if config.output_logits else None
        self._prepare(range(len(requests)))

    def take(self, other: Target, places: Sequence[int], running: Sequence[int]) -> None:
        """Decide for the texts of `other` in the rows `places`, and no longer for rows that are not `running`."""
        for place, request in zip(places, other.of_rows, strict=True):
            self.of_rows[place : place + 1] = [request]
        self._prepare([*running, *places])

    def _prepare(self, running: Sequence[int]) -> None:
        """Prepare the decisions of the rows `running`.

        If some of them are greedy and others sample, all draw, and those of a greedy row always give its best token."""
        requests = self.of_rows
        sampling = [requests[row].do_sample for row in running]
        self.do_sample = any(sampling)
        self.processors = [LogitsProcessorList() for _ in requests]
        for row, samples in zip(running, sampling, strict=True):
            best = [] if samples == self.do_sample else [MostProbable()]
            self.processors[row] = LogitsProcessorList([*requests[row].processors, *best])
        self.warpers = [LogitsProcessorList(p for p in own if type(p) in WARPERS) for own in self.processors]
        self.draws = requests[0].draws([request.generator for request in requests])
        keeps = self.kept_scores is not None or self.kept_logits is not None
        self.is_argmax = not self.do_sample and not keeps and not any(self.processors)
        """Whether one argmax over raw logits decides, so that all nodes can be decided at once."""
        kinds = {type(processor) for row in running for processor in self.processors[row]}
        self.is_textless = not keeps and kinds.issubset(SCORES_ONLY) and self._are_equal(running)
        """Whether all rows have the same processors, which look only at scores, so that one call serves all rows."""
        self.is_pure = not keeps and kinds.issubset((*SCORES_ONLY, *READERS, MostProbable))
        """Whether scores may be computed for nodes that are not chosen, in any order, as no call leaves a trace."""
        self.of_all = self.processors[running[0]]
        """For `is_textless` targets: the processors of every row."""

    def _are_equal(self, running: Sequence[int]) -> bool:
        first, *others = (settings_of(self.processors[row]) for row in running)
        return all(other == first for other in others)

    def scores(self, row: int, prefix: Tensor, logits: Tensor) -> Tensor:
        """Apply the logits processors of a row to the logits [V] after its text `prefix` [1, T]; returns scores [1, V].

        Call this method once for each token that is chosen, in the order of the text: processors may keep a state
        between calls, and scores may be recorded."""
        # On the prefix's device, where generators and the processors' tensors are, whatever device the last layer has.
        raw = logits[None].to(device=prefix.device, copy=True, dtype=torch.float32)
        if self.kept_logits is not None:
            self.kept_logits[row].append(raw.clone())  # a processor may write in place
        scores = processed(self.processors[row], prefix, raw)
        if self.kept_scores is not None:
            self.kept_scores[row].append(scores)
        return scores

    def scores_of(self, logits: Tensor, device: torch.device) -> Tensor:
        """Apply the logits processors to `logits` [X, V] at X positions of any rows; only for `is_textless` targets."""
        raw = logits.to(device=device, dtype=torch.float32)  # no copy, as none of these processors writes in place
        return processed(self.of_all, self._no_text(raw), raw)

    def scores_of_nodes(
        self, row: int, prefix: Tensor, ids: Tensor, paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        """Apply the logits processors of a row to the `logits` [N, V] after the N nodes of a draft; returns [N, V].

        The row's text is `prefix` [1, T], root included; `ids` [N] are the nodes' tokens, and `paths` the nodes from
        the root to each node. Nodes of one depth are processed together, unless a processor might not expect that."""
        raw = logits.to(device=prefix.device, copy=True, dtype=torch.float32)
        groups: dict[int, list[int]] = {}
        for node, path in enumerate(paths):
            groups.setdefault(len(path) if self.is_pure else node, []).append(node)
        scores = torch.empty_like(raw)
        for nodes in groups.values():
            at, below = (on_device(numbers, ids.device) for numbers in (nodes, [paths[node][1:] for node in nodes]))
            texts = torch.cat([prefix.expand(len(nodes), -1), ids[below.long()]], dim=1)
            scores[at] = processed(self.processors[row], texts, raw[at])
        return scores

    def decide(self, draws: Draws, rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        """Decide on R tokens [R], one per row: the most probable token, or a draw from the softmax of the scores.

        Token i is for row `rows[i]` of `draws`, and its scores are `scores[index[i]]`; `scores` is [M, V]. Random draws
        are made in the order of the tokens, one for each written token in effect, so with `RowDraws` a seed gives the
        text of `model.generate`."""
        if not self.do_sample:
            return best_of(scores)[index]
        return draws.tokens(rows, scores.softmax(-1), index)

    def next(
        self, rows: Sequence[int], sequences: Sequences, logits: Tensor, most_probable_only: bool = False
    ) -> Tensor:
        """Decide on the next token of each of B `rows` [B], from the logits [B, V] after their texts.

        With `most_probable_only`, the token is never drawn at random."""
        if self.is_argmax:
            return most_probable(logits)
        if self.is_textless:
            scores = self.scores_of(logits, sequences.buffer.device)
        else:
            scores = torch.cat([self.scores(row, sequences.prefix(row), logits[i]) for i, row in enumerate(rows)])
        if most_probable_only:
            return best_of(scores)
        everyone = torch.arange(len(rows), device=scores.device)
        return self.decide(self.draws.of(rows), everyone, scores, everyone)

    def draft_probabilities(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """Apply the target's temperature, top-k and top-p to a drafter's logits [B, nodes, V]; returns q.

        Draft tokens are drawn from q, which affects how many tokens are accepted, but not the distribution of the text.
        Penalties depend on tokens that are not drawn yet, so q is computed without them."""
        if self.is_textless:
            flat = logits.float().flatten(0, 1)
            warped = processed(self.warpers[rows[0]], self._no_text(flat), flat).view_as(logits)
        else:
            each = zip(rows, logits.float(), strict=True)
            warped = torch.stack([processed(self.warpers[row], self._no_text(one), one) for row, one in each])
        return warped.softmax(-1)

    def _no_text(self, scores: Tensor) -> Tensor:
        """Ids [X, 1] for the scores [X, V] of processors that read no ids."""
        return torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device)


def processed(processors: LogitsProcessorList, ids: Tensor, scores: Tensor) -> Tensor:
    """Process scores [X, V] after `ids` [X, T]. RequestError: a processor gives scores for other rows than these."""
    shape = scores.shape
    for processor in processors:  # the list's own `__call__` inspects each signature again, which takes longer
        if isinstance(processor, logits_process.EtaLogitsWarper) and scores.isnan().any():
            continue  # PyTorch refuses the distribution that it makes; the host finds NaN when it reads the tokens
        scores = processor(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))
        if scores.shape != shape:  # of a user's processor that was made for a batch
            made = f"{type(processor).__name__} made scores of shape {list(scores.shape)} from {list(shape)}"
            raise RequestError(f"{made}, and in decode sees each text alone; pass the prompts one at a time")
    return scores


def settings_of(processors: LogitsProcessorList) -> list[tuple[type, dict[str, object]]]:
    """The kinds and settings of a row's processors; rows with equal ones compute the same scores of the same text."""
    return [(type(p), {name: _number(value) for name, value in vars(p).items()}) for p in processors]


def _number(value: object) -> object:
    return value.tolist() if isinstance(value, Tensor) else value
