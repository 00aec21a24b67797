"""Attention of heads to the text before and to their path, with rotary positions (Su et al. 2021, arXiv 2104.09864).

A path's own keys are few and differ from node to node. The text's keys are many and the same for all nodes. One
attention covers both, without a copy of the text's keys for each node. The score s_j of own key j is computed first and
put into an extra dimension j, where own key j is 1 and all other keys are 0:

    query   [q ; s_0 ... s_j]        keys   [k_i ; 0]  i in the text      values   [v_i ; 0]
                                            [0 ; e_j]  own                         [0 ; e_j]

So the softmax covers text and own keys, and the extra dimensions of its output are the weights of the own keys.

Shapes: B rows, S pairs in the cache, Q queries a row (R of them, if only some are asked), A attention heads, D their
size, J own keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.errors import RequestError

BASE = 10_000.0
"""The base of rotary positions."""
HEAD_SIZE = 64
"""The usual size of attention heads."""
NOTHING = -1e4
"""The score of an own key that does not exist yet: its weight is 0. It is finite, as text keys multiply it by 0."""


class ContextKV:
    """Keys and values of B rows, with the position of each query and the keys that it may see."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        position_ids: Tensor,
        steps: int,
        place: Tensor | None = None,
    ) -> None:
        """Prepare the attention of all steps.

        Args:
            keys, values: [B, A, S, D].
            seen: [B, Q, S], with 1 for B or Q if they share it: True where a query may look.
            position_ids: of the queries in the first step, in the queries' shape, or [B, 1] if a row shares one.
            steps: number of own keys at most; each stands one position after the one before.
            place: [R] indices of the queries among all B x Q; by default they come as [B, Q].
        """
        self.place, self.rows, self.queries, self.size = place, len(keys), seen.shape[1], keys.shape[-1]
        ahead = torch.arange(steps, device=position_ids.device)
        self.angles = rope_angles(position_ids[..., None] + ahead, self.size, keys.dtype)  # [..., steps, D] each
        self.extra = -(-steps // 8) * 8  # kernels are faster with multiples of 8
        hidden = F.pad(~seen, (0, self.extra))[:, None]
        self.mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
        unit = F.pad(torch.eye(self.extra, dtype=keys.dtype, device=keys.device), (self.size, 0))
        self.keys, self.values = (_extended(states, unit) for states in (keys, values))

    def attend(self, query: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the text and the own keys.

        Args:
            query: [B, W, A, D] with W = Q, or any number if all share `seen`; or [R, A, D] with `place`.
            own: [..., A, J] inner products of the queries with their own keys, not scaled.

        Returns:
            The text's part of the output, shaped like `query`, and the weights of the own keys, shaped like `own`.
        """
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
    """Append J states `unit` [J, D + J] to states [B, A, S, D]: [B, A, S + J, D + J]."""
    out = F.pad(states, (0, len(unit), 0, len(unit)))
    out[:, :, states.shape[2] :] = unit
    return out


def visible(length: int, document_ids: Tensor | None, device: torch.device, before: int = 0) -> Tensor:
    """A mask [B or 1, T, T]: True where a position sees another, at least `before` earlier and in the same document."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril(-before)[None]
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
    return seen


def attention_heads(hidden_size: int) -> int:
    """The number of attention heads of one even size, as near to 64 as `hidden_size` allows.

    Raises:
        RequestError: the hidden size is odd.
    """
    if hidden_size % 2:
        raise RequestError(
            f"attention in heads needs an even hidden size, not {hidden_size}; take heads.kind=recurrent instead of "
            "eagle, and heads.prefix_layers=0"
        )
    count = max(hidden_size // HEAD_SIZE, 1)
    while hidden_size % (2 * count):
        count -= 1
    return count


def rope_angles(position_ids: Tensor, head_size: int, dtype: torch.dtype, base: float = BASE) -> tuple[Tensor, Tensor]:
    """positions [...] -> cosines and sines [..., D] of their rotations; both halves are equal, as in Llama."""
    powers = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float32) / head_size
    angles = position_ids[..., None].float() * base**-powers
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def apply_rope(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x [..., D] by `rope_angles`, so that inner products depend on the distance of positions alone."""
    cos, sin = angles
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
