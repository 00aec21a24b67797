"""Random numbers, from one generator per row or one for all rows, and tokens drawn by inverting cumulative sums.

Shapes: B rows, R of them that draw, M distributions that they share, V vocabulary, C draws of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

MASS_LEFT = 2**-24
"""Siblings are drawn while more than this share of q is left; float64 sums cannot resolve less."""


class Draws(Protocol):
    """A source of random numbers for the rows of a batch."""

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        """Draw one token per row [R]: rows [R], probabilities [M, V], and which distribution each row takes [R]."""
        ...

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        """Draw `count` numbers in [0, 1) per row [R, count], float64."""
        ...


class RowDraws:
    """One generator per row, so that a row's text does not depend on the other rows of its batch.

    `None` stands for PyTorch's global generator, which `model.generate` uses.
    """

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self.generators = generators

    def of(self, rows: Sequence[int]) -> RowDraws:
        """The generators of these rows, numbered from 0 again, for a batch that finished rows have left."""
        return RowDraws([self.generators[row] for row in rows])

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        drawn = [
            torch.multinomial(p[at], 1, generator=self.generators[row])
            for row, at in zip(rows.tolist(), index.tolist(), strict=True)
        ]
        return torch.cat(drawn) if drawn else index.clone()

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        return self.of(rows.tolist()).block(count, rows.device)

    def block(self, count: int, device: torch.device) -> Tensor:
        """Draw `count` numbers for every row [B, count] on `device`, without waiting for the device."""
        drawn = [torch.rand(count, dtype=torch.float64, generator=g, device=device) for g in self.generators]
        return torch.stack(drawn) if drawn else torch.zeros(0, count, dtype=torch.float64, device=device)


class SharedDraws:
    """One generator for all rows: for very many rows that share few distributions."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        used, own = index.unique(return_inverse=True)
        return invert(cumulative(p[used] if len(used) < len(p) else p), own, self.uniforms(rows, 1)[:, 0])

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        return torch.rand(len(rows), count, dtype=torch.float64, generator=self.generator, device=rows.device)


def cumulative(p: Tensor) -> Tensor:
    """Running sums [M, V] of probabilities [M, V], in float64; the last sum of a row is exactly 1."""
    sums = p.cumsum(-1, dtype=torch.float64)
    return sums.div_(sums[:, -1:].clone())


def invert(sums: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Find the token [R] at height u [R] of running sums [M, V], for rows that take distribution `index` [R].

    Distribution m is shifted to the heights from m to m + 1, so that one search serves all of them. The numbers are
    kept a few rounding units below 1 (measured at height M), so that none is rounded into the next distribution. A
    token of probability 0 is never found, because its sum equals that of the token before.
    """
    heights = sums + torch.arange(len(sums), dtype=sums.dtype, device=sums.device)[:, None]
    found = torch.searchsorted(heights.flatten(), u.clamp(max=1 - 2**-52 * len(sums)) + index, right=True)
    return found - index * sums.shape[-1]


def draw_distinct(q: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Draw C tokens per row without replacement [R, C], from distributions q [M, V] and uniform numbers u [R, C].

    `index` [R] says which distribution each row takes. The intervals of the row's earlier draws are cut out of [0, 1),
    and the number is stretched over the gaps. If at most `MASS_LEFT` is left, the row's first token is repeated and
    does not count as a draw. This adds no bias: whether there is a draw depends on the earlier tokens, not on `u`.
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
        tokens[:, at] = torch.where(left > MASS_LEFT, invert(sums, index, x), tokens[:, 0])
    return tokens
