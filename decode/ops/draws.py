"""Random draws of tokens: from one generator per row or one for all rows, with and without replacement.

A broken model gives scores whose softmax is NaN. A draw from NaN is `NO_TOKEN`. The host finds it when it reads the
tokens, so that no check makes it wait.

Shapes: B rows of a batch, R of them that draw a token, M distributions that rows share, V vocabulary, C draws per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

NO_TOKEN = -1
BLOCK = 128
"""Tokens of a block of `QuickDraws`."""
MASS_LEFT = 2**-24
"""Drawing without replacement ends when the remaining probability is this small; float64 sums are not exact below."""


class RowDraws:
    """Random draws with one generator per row, so that a row's text does not depend on the rest of its batch.

    A generator `None` stands for PyTorch's global generator, which `model.generate` uses."""

    def __init__(self, generators: Sequence[torch.Generator | None]) -> None:
        self.generators = generators

    def of(self, rows: Sequence[int]) -> RowDraws:
        """Select rows of the batch: row i of the result draws with the generator of row `rows[i]`."""
        return RowDraws([self.generators[row] for row in rows])

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        """Draw one token for each of the batch rows `rows` [R]: `rows[i]` from `p[index[i]]`, where `p` is [M, V].

        These are the draws of `torch.multinomial`, bit for bit, which would wait for the device."""
        if not len(rows):
            return index.clone()
        noise = [torch.empty_like(p[0]).exponential_(generator=g) for g in self._generators(rows)]
        p = p.index_select(0, index)
        return (p / torch.stack(noise)).argmax(-1).masked_fill_(p[:, 0].isnan(), NO_TOKEN)

    def rewind(self, counts: Sequence[int]) -> None:
        """Tell how many of the tokens drawn for each row were needed; here all were."""

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        """Draw `count` uniform random numbers in [0, 1) for each of `rows` [R]; returns [R, count], float64."""
        drawn = [
            torch.rand(count, dtype=torch.float64, generator=g, device=rows.device) for g in self._generators(rows)
        ]
        return torch.stack(drawn) if drawn else torch.zeros(0, count, dtype=torch.float64, device=rows.device)

    def block(self, count: int, device: torch.device) -> Tensor:
        """Draw `count` uniform numbers in [0, 1) for every row, [B, count] on `device`; the host does not wait."""
        return self.uniforms(torch.arange(len(self.generators), device=device), count)

    def _generators(self, rows: Tensor) -> Sequence[torch.Generator | None]:
        """The generators of `rows` [R], in ascending order. Unless these are all rows, the host waits to read them."""
        everyone = len(rows) == len(self.generators)
        return self.generators if everyone else [self.generators[row] for row in rows.tolist()]


class QuickDraws(RowDraws):
    """Draws of tokens that take one random number each, where `RowDraws` takes V: 0.01 ms, not 0.9, for 49,152 tokens.

    For very many texts whose random numbers need not be those of `model.generate`."""

    def of(self, rows: Sequence[int]) -> QuickDraws:
        return QuickDraws([self.generators[row] for row in rows])

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        return invert_by_blocks(p, index, self.uniforms(rows, 1)[:, 0])


class RewoundDraws(RowDraws):
    """Draws of tokens for walks that go on after their ends: `rewind` takes back what came after a row's last token.

    So a seed gives the same text, whether or not a walk is lazy (`decode.accept.TreeWalk`)."""

    def __init__(self, draws: RowDraws, device: torch.device) -> None:
        """Draw as `draws` do."""
        self.sources = [generator or default_generator(device) for generator in draws.generators]
        super().__init__(self.sources)
        self.draws = type(draws)(self.sources)
        self.states: list[list[Tensor]] = []  # of each row's generator, before each of the draws

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        self.states.append([generator.get_state() for generator in self.sources])
        return self.draws.tokens(rows, p, index)

    def rewind(self, counts: Sequence[int]) -> None:
        """Set the generator of each row back to where it was after `counts[b]` draws of a token."""
        for row, count in enumerate(counts):
            if count < len(self.states):
                self.sources[row].set_state(self.states[count][row])


class SharedDraws:
    """The draws of `RowDraws`, with one generator for all rows; fast for very many rows that share distributions."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def tokens(self, rows: Tensor, p: Tensor, index: Tensor) -> Tensor:
        used, own = index.unique(return_inverse=True)
        return invert(cumulative(p[used] if len(used) < len(p) else p), own, self.uniforms(rows, 1)[:, 0])

    def uniforms(self, rows: Tensor, count: int) -> Tensor:
        return torch.rand(len(rows), count, dtype=torch.float64, generator=self.generator, device=rows.device)


Draws = RowDraws | SharedDraws
"""Draws of the tokens of a walk, and of drafts."""


def best_of(scores: Tensor) -> Tensor:
    """Return the best tokens [...] by the scores [..., V], and `NO_TOKEN` where they exclude every token."""
    best = scores.max(-1)
    return best.indices.masked_fill(best.values == -torch.inf, NO_TOKEN)


def default_generator(device: torch.device) -> torch.Generator:
    """PyTorch's global generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    generators: Sequence[torch.Generator] = torch.get_device_module(device).default_generators
    return generators[device.index or 0]


def cumulative(p: Tensor) -> Tensor:
    """Cumulative sums [M, V], in float64, of M distributions `p` [M, V]; the last sum of each is exactly 1."""
    sums = p.cumsum(-1, dtype=torch.float64)
    return sums.div_(sums[:, -1:].clone())


def invert(sums: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Draw a token for each of R rows by inverse transform sampling, from `cumulative` sums [M, V] and uniform `u` [R].

    Row i uses the distribution `index[i]`. A token of probability 0 is never found, because its sum equals that of the
    token before."""
    return Search(sums, index)(u)


def invert_by_blocks(p: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Draw a token for each of R rows by inverse transform sampling: row i from `p[index[i]]`, by `u[i]` in [0, 1).

    `p` is [M, V]. First a block of tokens is drawn and then one in it, so that V numbers are summed up only once, in
    float32: its rounding, less than 1e-6 of a probability, is that of a softmax. A token of probability 0 is never
    found."""
    rest = -p.shape[1] % BLOCK
    blocks = (F.pad(p, (0, rest)) if rest else p).unflatten(1, (-1, BLOCK))
    block, u = _interval(blocks.sum(-1)[index].double(), u)
    place, _ = _interval(blocks[index, block].double(), u)
    token = (block * BLOCK + place).clamp_max(p.shape[1] - 1)  # without any mass, the padding is found
    return token.masked_fill_(p[index, 0].isnan(), NO_TOKEN)


def _interval(masses: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Find the interval [R] that holds `u` [R] in [0, 1), and where in it, [R] in [0, 1).

    Row r's K intervals are as long as its `masses` [R, K] are large, scaled to 1 together."""
    ends = masses.cumsum(-1)
    x = torch.minimum(u[:, None] * ends[:, -1:], ends[:, -1:] * (1 - 2**-52))  # a product may round up to the end
    found = torch.searchsorted(ends, x, right=True).clamp_max(ends.shape[1] - 1)  # NaN: beyond the last
    length, end = masses.gather(1, found), ends.gather(1, found)
    return found[:, 0], ((x - end + length) / length).clamp(0, 1 - 2**-52)[:, 0]


class Search:
    """Finds the tokens of R rows by numbers in [0, 1): row i in `cumulative` sums of the distribution `index[i]`.

    The sums of distribution m are shifted to the range from m to m + 1, so that one search serves all rows. Numbers are
    kept a little below 1, so that the shift never rounds them into the next distribution."""

    def __init__(self, sums: Tensor, index: Tensor) -> None:
        """Prepare searches in `sums` [M, V] for the rows `index` [R]."""
        (count, self.size), self.index = sums.shape, index
        broken = sums[:, -1].isnan()
        heights = sums.masked_fill(broken[:, None], 1)  # with NaN among the sums, the search would miss others
        heights += torch.arange(count, dtype=sums.dtype, device=sums.device)[:, None]
        self.heights, self.first, self.broken = heights.flatten(), index * self.size, broken.index_select(0, index)
        self.below = 1 - 2**-52 * count

    def __call__(self, u: Tensor) -> Tensor:
        """Find the token [R] whose interval holds `u` [R]; `NO_TOKEN` in a distribution of NaN."""
        found = torch.searchsorted(self.heights, u.clamp(max=self.below) + self.index, right=True)
        return (found - self.first).masked_fill(self.broken, NO_TOKEN)


def draw_distinct(q: Tensor, index: Tensor, u: Tensor) -> Tensor:
    """Draw C tokens without replacement for each of R rows, from M distributions `q` [M, V] and uniform `u` [R, C].

    Row i uses `q[index[i]]`. A token's interval of [0, 1) is as long as its probability. The intervals of the row's
    earlier tokens are cut out, and its next number in `u` is scaled to the rest. If at most `MASS_LEFT` is left, the
    row's first token is repeated; acceptance skips it. This adds no bias: it is decided before that number is used.
    A distribution of NaN gives token 0, which acceptance skips, too. So broken heads do not change the text."""
    sums = cumulative(q)
    find = Search(sums, index)
    drawn = [find(u[:, 0]).clamp_min(0)]
    if u.shape[1] == 1:
        return drawn[0][:, None]
    ends = F.pad(sums, (1, 0)).flatten()  # each token's interval is from the entry before it to its own
    first = index * (sums.shape[1] + 1)
    edges: list[Tensor] = []  # [2, R] of each drawn token: the ends of its interval
    for at in range(1, u.shape[1]):
        place = first + drawn[-1]
        edges.append(ends[torch.stack([place, place + 1])])
        low, high = torch.stack(edges, dim=-1).sort(-1).values  # [R, at] each, in order
        cut = (high - low).cumsum(-1)  # up to the end of each interval
        left = 1 - cut[:, -1]
        x = u[:, at] * left.clamp_min(0)
        passed = x[:, None] >= low - (cut - (high - low))  # the intervals that lie before the number
        # The number moves by what is cut out before it. Rounding must not leave it inside the last interval.
        x = torch.maximum(x + (cut * passed).amax(-1), (high * passed).amax(-1))
        drawn.append(torch.where(left > MASS_LEFT, find(x).clamp_min(0), drawn[0]))
    return torch.stack(drawn, dim=1)
