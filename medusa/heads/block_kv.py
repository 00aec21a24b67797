"""Attention of a block of tokens to the text and to the block itself, for block drafters (`medusa.heads.dflash`).

A block has n queries and n own keys at the n positions after the text. Each query sees keys of the text, as far as its
window reaches, and keys of the block. One call of PyTorch's attention computes both, as `ContextKV` explains.

Shapes: B rows, S keys of the text, Q blocks of a row, R selected blocks, `...` either B, Q or R, n tokens of a block, A
attention heads, G heads of keys, D their size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.attention import attention
from medusa.heads.context_kv import KV, NOTHING, ContextKV, Rope, additive, extended


class BlockKV(ContextKV):
    """Keys and values of B texts, with masks and rotations, to which blocks of n tokens at given positions attend."""

    def __init__(
        self,
        kv: Sequence[KV],
        seen: Tensor,
        position_ids: Tensor,
        tokens: int,
        rope: Rope,
        windows: Iterable[int | None],
        place: Tensor | None = None,
    ) -> None:
        """Prepare S text tokens and Q blocks in each of B rows.

        Args:
            kv: for each layer the keys [B, G, S, D] and values [B, G, S, D] of the text, with the keys already rotated.
            seen: [B or 1, Q, S] the mask, True where the blocks see a text token.
            position_ids: [B, Q] the positions of the blocks' first tokens; [R] with `place`.
            tokens: n.
            rope: the rotations of keys and queries.
            windows: of all layers: the number of last keys that a query sees, itself included; `None`: all keys.
            place: [R] rising indices of the selected blocks in the flattened [B * Q]; by default all blocks."""
        keys = kv[0][0]
        if place is not None:
            seen, place = _selected(seen, place, len(keys))
        self.place, self.rows, self.queries, self.size = place, len(keys), seen.shape[1], keys.shape[-1]
        self.tokens, self.shape = tokens, position_ids.shape
        self.ahead = torch.arange(tokens, device=position_ids.device)
        self.angles = rope.angles(position_ids[..., None] + self.ahead, keys.dtype)  # [..., n, D] each
        self.extra = -(-tokens // 8) * 8  # attention kernels are faster with multiples of 8
        self.of_window = {window: additive(self._visible(seen, window), self.extra, keys) for window in {*windows}}
        unit = torch.eye(self.extra, dtype=keys.dtype, device=keys.device)
        self.layers = [(extended(keys, unit), extended(values, unit)) for keys, values in kv]

    def _visible(self, seen: Tensor, window: int | None) -> Tensor:
        """Return the mask of the text's keys for all queries [B or 1, Q n, S], or for the one block of a row [B, 1, S].

        A window begins later for each token of a block."""
        if window is None:
            return seen if self.queries == 1 else seen.repeat_interleave(self.tokens, dim=1)
        back = seen.flip(-1).cumsum(-1).flip(-1)  # 1 at the last key of the text, 2 at the key before it, ...
        return (seen[:, :, None] & (back[:, :, None] + self.ahead[:, None] < window)).flatten(1, 2)

    def _own(self, causal: bool, window: int | None) -> Tensor:
        """Return which of the block's n keys its n queries see, [n, n]."""
        apart = self.ahead[:, None] - self.ahead
        seen = torch.ones_like(apart, dtype=torch.bool) if window is None else apart.abs() < window
        return seen & (apart >= 0) if causal else seen

    def attend_in_block(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, causal: bool, window: int | None
    ) -> Tensor:
        """Attend with queries [..., n, A, D] to the text and to the block's keys and values [..., n, G, D].

        `layer` is the index of the layer whose text is used, `causal` whether a token sees only earlier ones of its
        block, and `window` as in the constructor. Return the attention's output [..., n, A, D], before its matrix."""
        groups, scale, count = key.shape[-2], query.shape[-1] ** -0.5, self.tokens
        by_group = query.unflatten(-2, (groups, -1))  # [..., n, G, A / G, D]
        own = torch.einsum("...qgad,...kgd->...qgak", by_group, key).flatten(-3, -2)  # [..., n, A, n]
        own = own.masked_fill(~self._own(causal, window)[:, None], NOTHING)
        mixed = F.pad(torch.cat([query, own], dim=-1), (0, self.extra - count), value=NOTHING)
        if self.place is not None:
            grid = mixed.new_zeros(self.rows * self.queries, *mixed.shape[1:])
            mixed = grid.index_copy(0, self.place, mixed).unflatten(0, (self.rows, -1))
        keys, values = self.layers[layer]
        out = attention(mixed.flatten(1, 2).transpose(1, 2), keys, values, self.of_window[window], scale)
        out = out.transpose(1, 2).unflatten(1, (-1, count))
        if self.place is not None:
            out = out.flatten(0, 1)[self.place]
        seen, shares = out[..., : self.size], out[..., self.size : self.size + count].unflatten(-2, (groups, -1))
        return seen + torch.einsum("...qgak,...kgd->...qgad", shares, value).flatten(-3, -2)


def _selected(seen: Tensor, place: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Leave out the masks [B or 1, Q, S] of blocks that are not selected: return those of as many blocks in each row.

    The second result is where the R blocks at `place` in [B * Q] are now. A row with fewer ones repeats its first."""
    row, block = place // seen.shape[1], place % seen.shape[1]
    counts = row.bincount(minlength=rows)
    among = torch.arange(len(place), device=place.device) - (counts.cumsum(0) - counts)[row]
    kept = block.new_zeros(rows, int(counts.max())).index_put((row, among), block)
    of_kept = seen.expand(rows, -1, -1).gather(1, kept[..., None].expand(-1, -1, seen.shape[2]))
    return of_kept, row * kept.shape[1] + among
