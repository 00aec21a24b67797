"""From the backbone's logits to target probabilities and tokens: the only place, and through transformers' own objects.

Temperature, top-k, top-p and penalties are `LogitsProcessor`s that transformers prepared. They see one row at a time:
the prompt, everything written and the path down to a node, exactly what plain decoding would show them there.

Shapes: R rows, M distributions that they share, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from decode.accept import Draws, typical
from decode.ops.fast_topk import argmax
from decode.sequences import Request, Sequences

# Processors that look at scores alone; all others may depend on the prompt's length or on the row.
POSITION_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


def most_probable(logits: Tensor) -> Tensor:
    """logits [..., V] -> token [...]; float64 is compared as float32, as transformers does."""
    return argmax(logits.float() if logits.dtype == torch.float64 else logits)


class Truncation(NamedTuple):
    """Sampled typical acceptance: a target without its untypical tokens (`decode.accept.typical`)."""

    epsilon: float
    delta: float


class Target:
    """What texts are to follow: the backbone's distribution as changed by processors, or its most probable token."""

    def __init__(self, requests: Sequence[Request], truncation: Truncation | None = None) -> None:
        self.processors = [request.processors for request in requests]
        self.warpers = [LogitsProcessorList(p for p in r.processors if isinstance(p, POSITION_FREE)) for r in requests]
        self.truncation = truncation
        self.do_sample = requests[0].do_sample
        self.draws = RowDraws([request.generator for request in requests])
        config = requests[0].config
        self.kept_scores: list[list[Tensor]] | None = [[] for _ in requests] if config.output_scores else None
        """Per row the scores [1, V] of every token decided on, in order; `None` where nobody asked for them."""
        self.kept_logits: list[list[Tensor]] | None = [[] for _ in requests] if config.output_logits else None
        """The same, before processing."""

    @property
    def is_argmax(self) -> bool:
        """Whether one argmax over raw logits says it all, so that all nodes can be decided on at once."""
        keeps = self.kept_scores is not None or self.kept_logits is not None
        return not self.do_sample and not keeps and not any(self.processors)

    def scores(self, row: int, prefix: Tensor, logits: Tensor) -> Tensor:
        """prefix [1, T] ids and logits [V] of its last position -> processed scores [1, V], float32.

        To be called once for every token that is decided on, in order: processors may have a state of their own, and
        what `generate` returns as scores is kept here.
        """
        # On the text's device, where generators and the processors' own tensors are, wherever the last layer lies.
        raw = logits[None].to(device=prefix.device, copy=True, dtype=torch.float32)
        if self.kept_logits is not None:
            self.kept_logits[row].append(raw.clone())  # a processor may write in place
        scores: Tensor = self.processors[row](prefix, raw)  # type: ignore[arg-type]
        if self.truncation is not None:
            scores = scores.masked_fill(~typical(scores.softmax(-1), *self.truncation), -torch.inf)
        if self.kept_scores is not None:
            self.kept_scores[row].append(scores)
        return scores

    def decide(self, draws: Draws, rows: Tensor, scores: Tensor, index: Tensor) -> Tensor:
        """rows [R], their scores [M, V] and which each takes [R] -> tokens [R]: most probable, or one draw each.

        Draws happen in the order of the tokens, one a token, so a seed gives the text that `model.generate` gives.
        """
        if not self.do_sample:
            return scores.argmax(-1)[index]
        return draws.tokens(rows, scores.softmax(-1), index)

    def next(
        self, rows: Sequence[int], sequences: Sequences, logits: Tensor, most_probable_only: bool = False
    ) -> Tensor:
        """logits [B, V] after what is written in `rows` -> the next token of each [B]."""
        if self.is_argmax:
            return most_probable(logits)
        scores = torch.cat([self.scores(row, sequences.prefix(row), logits[i]) for i, row in enumerate(rows)])
        if most_probable_only:
            return scores.argmax(-1)
        everyone = torch.arange(len(rows), device=scores.device)
        return self.decide(self.draws.of(rows), everyone, scores, everyone)

    def draft_probabilities(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """A drafter's logits [B, Q, V] -> q [B, Q, V] to sample drafts from, warped as the target is.

        Temperature, top-k, top-p and the like: any q gives the right text, and the closer it is to the target, the more
        is accepted. Penalties depend on a path that is not drawn yet, so q goes without them.
        """
        anything = torch.zeros(logits.shape[1], 1, dtype=torch.long, device=logits.device)  # these do not look at ids
        warped = [self.warpers[row](anything, logits[i].float()) for i, row in enumerate(rows)]  # type: ignore[arg-type]
        return torch.stack(warped).softmax(-1)

    def by_position(
        self, kept: Sequence[Sequence[Tensor]], new_ids: Sequence[Sequence[int]], width: int
    ) -> tuple[Tensor, ...]:
        """Kept scores as `generate` returns them: `width` times [B, V]; under padding a row's last are repeated."""
        return tuple(
            torch.cat([kept[row][min(at, len(ids) - 1)].clone() for row, ids in enumerate(new_ids)])
            for at in range(width)
        )


class RowDraws:
    """Every row draws from a generator of its own, so that its text is what it would be alone (`decode.accept.Draws`).

    With `None` it is PyTorch's global one, as in `model.generate`.
    """

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self.generators = generators

    def of(self, rows: Sequence[int]) -> RowDraws:
        """The same streams for some of the rows, numbered anew from 0: a batch that finished rows have left."""
        return RowDraws([self.generators[row] for row in rows])

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        drawn = [
            torch.multinomial(p[at], 1, generator=self.generators[row])
            for row, at in zip(rows.tolist(), index.tolist(), strict=True)
        ]
        return torch.cat(drawn) if drawn else index.clone()

    def uniform(self, rows: Tensor) -> Tensor:
        return self.uniforms(rows, 1)[:, 0]

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        """`count` numbers for each of `rows` [R, count], float64 in [0, 1)."""
        drawn = [
            torch.rand(count, dtype=torch.float64, generator=self.generators[row], device=rows.device)
            for row in rows.tolist()
        ]
        return torch.stack(drawn) if drawn else rows.new_zeros(0, count, dtype=torch.float64)

    def block(self, count: int, device: torch.device) -> Tensor:
        """`count` numbers for every row [B, count], made on `device`; nothing waits for it."""
        drawn = [torch.rand(count, dtype=torch.float64, generator=g, device=device) for g in self.generators]
        return torch.stack(drawn)


class SharedDraws:
    """All rows draw from one generator, by inverting cumulative sums: for very many rows over few distributions."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        used, own = index.unique(return_inverse=True)
        return invert(cumulative(p[used] if len(used) < len(p) else p), own, self.uniform(rows))

    def uniform(self, rows: Tensor) -> Tensor:
        return self.uniforms(rows, 1)[:, 0]

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        return torch.rand(len(rows), count, dtype=torch.float64, generator=self.generator, device=rows.device)


def cumulative(p: Tensor) -> Tensor:
    """probabilities [M, V] -> their running sums [M, V], float64; the last one is exactly 1."""
    sums = p.cumsum(-1, dtype=torch.float64)
    return sums.div_(sums[:, -1:].clone())


def invert(sums: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Running sums [M, V], which of them to take [R] and numbers in [0, 1) [R] -> the tokens at these heights [R].

    Distribution m is looked up between m and m + 1, so that one search serves all; a number is kept so far below 1 (a
    few units of rounding at height M) that it does not round up into the next one. A token of probability 0 is never
    found: its sum is that of the token before.
    """
    heights = sums + torch.arange(len(sums), dtype=sums.dtype, device=sums.device)[:, None]
    found = torch.searchsorted(heights.flatten(), u.clamp(max=1 - 2**-52 * len(sums)) + index, right=True)
    return found - index * sums.shape[-1]


LEAST_LEFT = 2**-24  # of q, below which no further sibling is drawn: sums in float64 would not resolve its law


def draw_distinct(q: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Draw without replacement, in order: q [M, V], which of them to take [R], numbers [R, C] -> tokens [R, C].

    Each draw is uniform over what the earlier ones have left: their stretches are cut out of [0, 1), and the number is
    stretched back over the gaps. Where no more than LEAST_LEFT is left, the first token comes out again, and stands
    for no draw. That biases nothing: whether there is a draw depends on the tokens drawn before, never on `u`.
    """
    sums = cumulative(q)
    start = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1]], dim=1)
    tokens = torch.zeros(u.shape, dtype=torch.long, device=q.device)
    for at in range(u.shape[1]):
        gone = tokens[:, :at].sort(-1).values
        low, high = start[index[:, None], gone], sums[index[:, None], gone]  # [R, at]
        left = 1 - (high - low).sum(-1)
        x = u[:, at] * left.clamp_min(0)
        for gap in range(at):
            x = torch.where(x >= low[:, gap], x - low[:, gap] + high[:, gap], x)
        tokens[:, at] = torch.where(left > LEAST_LEFT, invert(sums, index, x), tokens[:, 0])
    return tokens
