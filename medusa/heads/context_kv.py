"""Attention of heads to the text and to their path in the tree, with rotary embeddings (RoPE, arXiv 2104.09864).

A query attends to two sets of keys. The keys of the text are many, and all queries of a row share them. Each query
also has a few own keys, from its path. One call of PyTorch's attention computes both, without copying the text's keys.
The score s_j of own key j is computed in advance and put into an extra dimension j. With unit vectors e_j:

    query   [q ; s_0 ... s_J-1]      text    key [k_i ; 0]     value [v_i ; 0]
                                     own     key [0 ; e_j]     value [0 ; e_j]

So the softmax runs over text keys and own keys. The extra dimensions of the output are the weights of the own keys. The
caller multiplies the own values by these weights and adds them to the output.

Shapes: B rows, S keys of the text, Q queries of a row, R selected queries, A attention heads, D their size, J own keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.errors import RequestError

BASE = 10_000.0  # of the rotary embeddings
NOTHING = -1e4  # the score of an unused own key, so that its weight is 0; finite, because 0 times infinity is NaN


class ContextKV:
    """Keys and values of B texts, with masks and rotations, to which Medusa heads at given positions attend."""

    def __init__(
        self, keys: Tensor, values: Tensor, seen: Tensor, position_ids: Tensor, steps: int, place: Tensor | None = None
    ) -> None:
        """Prepare S text tokens and Q queries in each of B rows for attention with A attention heads of size D.

        Args:
            keys, values: [B, A, S, D] keys and values of the text, with the keys already rotated.
            seen: [B, Q, S] the mask, True where a query sees a text token. B or Q is 1 if rows or queries share it.
            position_ids: [B, Q] positions of head 0's queries; [B, 1] if a row's queries share one, [R] with `place`.
            steps: the number of heads, the maximum of J. Head i (from 0) adds one own key, at `position_ids` + i.
            place: [R] indices of the selected queries in the flattened [B * Q]; by default all queries."""
        self.place, self.rows, self.queries, self.size = place, len(keys), seen.shape[1], keys.shape[-1]
        ahead = torch.arange(steps, device=position_ids.device)
        self.angles = rope_angles(position_ids[..., None] + ahead, self.size, keys.dtype)  # [..., steps, D] each
        self.extra = -(-steps // 8) * 8  # attention kernels are faster with multiples of 8
        hidden = F.pad(~seen, (0, self.extra))[:, None]
        # Kernels on a GPU need rows that are a multiple of 8 elements apart, or copy the mask in every call.
        shape, width = hidden.shape[:-1], hidden.shape[-1]
        mask = torch.zeros(*shape, -(-width // 8) * 8, dtype=keys.dtype, device=keys.device)[..., :width]
        self.mask = mask.masked_fill_(hidden, -torch.inf)
        unit = F.pad(torch.eye(self.extra, dtype=keys.dtype, device=keys.device), (self.size, 0))
        self.keys, self.values = (_extended(states, unit) for states in (keys, values))

    def attend(self, query: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to text and own keys; return the text's part of the output, and own keys' softmax weights [..., A, J].

        Args:
            query: [B, Q, A, D], or [R, A, D] for the R queries that the constructor's `place` selects; the text's part
                has this shape too. If all queries share the mask (`seen` is [B, 1, S]), Q can be any number.
            own: [..., A, J] unscaled inner products of each query with its own keys; J counts those so far."""
        count = own.shape[-1]
        query = F.pad(torch.cat([query, own], dim=-1), (0, self.extra - count), value=NOTHING)
        if self.place is not None:
            grid = query.new_zeros(self.rows * self.queries, *query.shape[1:])
            query = grid.index_copy(0, self.place, query).unflatten(0, (self.rows, -1))
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2), self.keys, self.values, attn_mask=self.mask, scale=self.size**-0.5
        ).transpose(1, 2)
        if self.place is not None:
            out = out.flatten(0, 1)[self.place]
        return out[..., : self.size], out[..., self.size : self.size + count]


def _extended(states: Tensor, unit: Tensor) -> Tensor:
    """Pad keys or values [B, A, S, D] with J zeros, append `unit` [J, D + J], and return [B, A, S + J, D + J]."""
    out = F.pad(states, (0, len(unit), 0, len(unit)))
    out[:, :, states.shape[2] :] = unit
    return out


def attention_heads(hidden_size: int) -> int:
    """Choose how many attention heads of equal, even size (about 64) to use; RequestError for an odd `hidden_size`."""
    if hidden_size % 2:
        found = f"heads of kind eagle, and heads.prefix_layers, need an even hidden size, not {hidden_size}"
        raise RequestError(f"{found}; take heads.kind=recurrent, or leave heads.prefix_layers out")
    count = max(hidden_size // 64, 1)
    while hidden_size % (2 * count):
        count -= 1
    return count


def rope_angles(position_ids: Tensor, head_size: int, dtype: torch.dtype, base: float = BASE) -> tuple[Tensor, Tensor]:
    """Compute RoPE's cosines and sines [..., D = `head_size`] at positions [...]. The second half repeats the first."""
    powers = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    angles = position_ids[..., None].float() * base**-powers
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def apply_rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate queries or keys x [..., D] by `angles`, the cosines and sines that `rope_angles` returns."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
