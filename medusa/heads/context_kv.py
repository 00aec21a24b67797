"""What steps look back at: keys and values of all that was said before, shared by every path behind it.

A path's own keys are few and differ from node to node; the text's are many and the same for all. One attention over
both, without a copy of the text's for every node: the score of own key j is computed apart and put into a dimension j
of its own, where key j of J further ones is 1 and all others are 0.

    query   [q ; s_0 ... s_j]        keys   [k_i ; 0]  i in the text      values   [v_i ; 0]
                                            [0 ; e_j]  own                         [0 ; e_j]

So the softmax runs over text and own keys together, and the further dimensions of its output are the own keys' weights.

Shapes: B rows, S pairs remembered, Q queries a row (R of them, if not all are asked), A attention heads, D head size,
J own keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.heads.rope import rope_angles

NOTHING = -1e4
"""The score of an own key that is not there yet: no weight at all, and finite, since text keys multiply it by 0."""


class ContextKV:
    """Keys and values of B rows, which of them each query may see, and where the queries stand."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        seen: Tensor,
        position_ids: Tensor,
        steps: int,
        place: Tensor | None = None,
    ) -> None:
        """
        Args:
            keys, values: [B, A, S, D].
            seen: [B, Q, S], or 1 in place of B and Q: True where a query may look.
            position_ids: of the queries' first step, in the queries' shape, or [B, 1] where all of a row have one.
            steps: as many as own keys at most; each one stands a position behind the one before.
            place: [R] which of the B x Q the queries are; by default they come as [B, Q].
        """
        self.place, self.rows, self.queries, self.size = place, len(keys), seen.shape[1], keys.shape[-1]
        ahead = torch.arange(steps, device=position_ids.device)
        self.turns = rope_angles(position_ids[..., None] + ahead, self.size, keys.dtype)
        self.room = -(-steps // 8) * 8  # kernels like multiples of 8
        hidden = F.pad(~seen, (0, self.room))[:, None]
        self.mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
        unit = F.pad(torch.eye(self.room, dtype=keys.dtype, device=keys.device), (self.size, 0))
        self.keys, self.values = (_extended(states, unit) for states in (keys, values))

    @classmethod
    def of_texts(
        cls,
        keys: Tensor,
        values: Tensor,
        position_ids: Tensor,
        document_ids: Tensor | None,
        steps: int,
        place: Tensor | None = None,
    ) -> ContextKV:
        """For queries at the positions of whole texts: each one sees the earlier positions of its own document.

        A head knows the pair at its own position from the path.

        Args:
            keys, values: [B, A, T, D].
            position_ids, document_ids: [B, T].
            steps, place: as in `__init__`.
        """
        seen = visible(keys.shape[2], document_ids, keys.device, before=1)
        return cls(keys, values, seen, position_ids if place is None else position_ids.flatten()[place], steps, place)

    def turn(self, step: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., D] of the queries' positions in a step."""
        cos, sin = self.turns
        return cos[..., step, :], sin[..., step, :]

    def look(self, query: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to the context_kv, together with own keys.

        Args:
            query: [B, W, A, D] with W = Q or any number if `seen` is one for all, or [R, A, D] with `place`.
            own: [..., A, J] inner products of the queries with their own keys, not scaled.

        Returns:
            The context_kv's part of the output, like `query`, and the own keys' weights, like `own`.
        """
        count = own.shape[-1]
        query = F.pad(torch.cat([query, own], dim=-1), (0, self.room - count), value=NOTHING)
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
    """[B, A, S, D] and J further ones [J, D + J] -> [B, A, S + J, D + J]."""
    out = F.pad(states, (0, len(unit), 0, len(unit)))
    out[:, :, states.shape[2] :] = unit
    return out


def visible(length: int, document_ids: Tensor | None, device: torch.device, before: int = 0) -> Tensor:
    """[B or 1, T, T] which positions a position may see: those at least `before` before it, in its own document."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril(-before)[None]
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
    return seen
