"""What recurrent layers compute over a token tree, in one forward, and the state that an accepted path leaves.

A layer with a linear update has at node i, whose parent is p, the state

    S_i = a_i S_p + k_i u_i^T                      a_i: a decay, between 0 and 1
    u_i = beta_i (v_i - (a_i S_p)^T k_i)           gated delta rule (Yang et al., 2024, Gated Delta Networks, eq. 10)
    u_i = dt_i x_i,  k_i = B_i                     Mamba-2 (Dao and Gu, 2024, eq. 16), which corrects nothing

With c_i, the sum of log a along the path to i, and S_0, the state after the text, that is

    S_i = e^{c_i} S_0 + sum over the ancestors j of i, i included: e^{c_i - c_j} k_j u_j^T

So the chunk form of these papers holds for a tree, too, if decays are summed along paths, and if the ancestor relation
replaces the triangular mask. Parents come before children, so one triangular solve gives all u.

Shapes: B rows, N nodes, H heads, K and V sizes of keys and values, C channels, S numbers of Mamba's state."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

NORM_EPS = 1e-6  # of the norm of queries and keys in transformers' gated delta rules


class Update(Protocol):
    """How the nodes of one forward would change the state of one layer."""

    def apply(self, state: Tensor, last: Tensor, on_path: Tensor) -> None:
        """Change `state` [B, ...] in place to that after the path to node `last[b]` of each row.

        `last` are indices [B]; `on_path` [B, N] says which nodes are on the path, none in a row that keeps its state.
        """


class RankOne(NamedTuple):
    """States that each node decays, and to which it adds the outer product of a row and a column vector."""

    rows: Tensor  # [B, H, N, R]
    columns: Tensor  # [B, H, N, D]
    decay: Tensor  # [B, H, N, 1 or R]: the sum c_i of the logarithms of decays on the path to each node

    def apply(self, state: Tensor, last: Tensor, on_path: Tensor) -> None:
        size = self.decay.shape[-1]
        at_last = self.decay.gather(
            2, last[:, None, None, None].expand(-1, self.decay.shape[1], 1, size)
        )  # [B, H, 1, .]
        at_last = at_last.masked_fill(~on_path.any(1)[:, None, None, None], 0)
        weights = (at_last - self.decay).masked_fill(~on_path[:, None, :, None], -torch.inf).exp()  # [B, H, N, .]
        added = (self.rows * weights).mT @ self.columns
        state.mul_(at_last.mT.exp()).add_(added)


class StateOfEach(NamedTuple):
    """The states [B, N, ...] after all nodes, of layers whose decays have no common factor (Mamba-1)."""

    states: Tensor

    def apply(self, state: Tensor, last: Tensor, on_path: Tensor) -> None:
        found = self.states[torch.arange(len(last), device=last.device), last]
        keeps = ~on_path.any(1).view(-1, *[1] * (state.dim() - 1))
        state.copy_(torch.where(keeps, state, found))


class NextState(NamedTuple):
    """The state [B, ...] after a piece of text, of which each row has read its own tokens only."""

    state: Tensor

    def apply(self, state: Tensor, last: Tensor, on_path: Tensor) -> None:
        state.copy_(self.state)


def convolved(columns: Tensor, taps: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve each node's last ancestors; returns [B, C, N] in the dtype of `columns`.

    `columns` [B, C, W + N] are the last W inputs of the text and those of the nodes. `taps` [B or 1, N, W] are the
    columns that each node reads, itself last. `weight` is [C, W], `bias` [C]."""
    rows, nodes, width = taps.shape
    if rows == 1:
        read = columns[:, :, taps[0]]  # [B, C, N, W]
    else:
        flat = taps.flatten(1)[:, None].expand(-1, columns.shape[1], -1)
        read = columns.gather(2, flat).unflatten(2, (nodes, width))
    wide = torch.promote_types(columns.dtype, torch.float32)  # as a convolution adds up
    out = (read.to(wide) * weight[:, None].to(wide)).sum(-1)
    if bias is not None:
        out = out + bias[:, None].to(wide)
    return out.to(columns.dtype)


def gated_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor, seen: Tensor, norm: bool
) -> tuple[Tensor, Update]:
    """The gated delta rule over a tree, with one decay for each head (GDN) or each channel of a key (KDA).

    Args:
        query, key: [B, N, heads of keys, K]; each serves H / heads of keys heads.
        value: [B, N, H, V].
        decay: [B, N, H] or [B, N, H, K]: log a.
        beta: [B, N, H].
        state: [B, H, K, V].
        seen: [B or 1, N, N], true at [_, i, j] where j is i or its ancestor.
        norm: whether queries and keys are normalised first.

    Returns the outputs [B, N, H, V] in the query's dtype, and the update of the state."""
    dtype, groups = query.dtype, value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(groups, 2) if groups > 1 else each for each in (query, key))
    query, key, value, decay, beta = (each.transpose(1, 2).to(state.dtype) for each in (query, key, value, decay, beta))
    if norm:
        query, key = (each * (each.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for each in (query, key))
    query, beta = query * query.shape[-1] ** -0.5, beta[..., None]
    of_heads = decay.dim() == 3
    total = seen[:, None].to(state.dtype) @ (decay[..., None] if of_heads else decay)  # [B, H, N, 1 or K]
    grown = total.exp()
    from_text, out = (torch.cat([key * grown, query * grown], dim=2) @ state).chunk(2, dim=2)
    update = beta * (value - from_text)
    if of_heads:
        pair = (total - total.mT).masked_fill(~seen[:, None], -torch.inf).exp()  # [B, H, N, N]
        of_key, of_query = (key @ key.mT) * pair, (query @ key.mT) * pair
    else:
        apart = total[:, :, :, None] - total[:, :, None]  # [B, H, N, N, K]
        weighted = apart.masked_fill_(~seen[:, None, :, :, None], -torch.inf).exp_() * key[:, :, None]
        of_key, of_query = ((weighted @ each[..., None])[..., 0] for each in (key, query))
    if update.shape[2] > 1:
        update = torch.linalg.solve_triangular(beta * of_key, update, upper=False, unitriangular=True)
    out = out + of_query @ update
    return out.transpose(1, 2).to(dtype), RankOne(key, update, total)


def mamba2(
    inputs: Tensor,
    step: Tensor,
    rate: Tensor,
    into: Tensor,
    out_of: Tensor,
    skip: Tensor | None,
    state: Tensor,
    seen: Tensor,
) -> tuple[Tensor, Update]:
    """Mamba-2's scan over a tree.

    Args:
        inputs: x [B, N, H, P].
        step: dt [B, N, H], after bias and softplus.
        rate: A [H], negative.
        into, out_of: B and C [B, N, groups, S]; each group serves H / groups heads.
        skip: D [H].
        state: [B, H, P, S].
        seen: as in `gated_delta`.

    Returns the outputs [B, N, H, P] in the state's dtype, and the update of the state."""
    heads, wide = inputs.shape[2], state.dtype
    inputs, step = inputs.to(wide).transpose(1, 2), step.to(wide).transpose(1, 2)  # [B, H, N, P], [B, H, N]
    into, out_of = (
        each.to(wide).transpose(1, 2).repeat_interleave(heads // each.shape[2], 1) for each in (into, out_of)
    )
    update = inputs * step[..., None]
    total = seen[:, None].to(wide) @ (rate.to(wide)[:, None] * step)[..., None]  # [B, H, N, 1]
    pair = (total - total.mT).masked_fill(~seen[:, None], -torch.inf).exp()
    out = (out_of * total.exp()) @ state.mT + ((out_of @ into.mT) * pair) @ update
    if skip is not None:
        out = out + skip.to(wide)[:, None, None] * inputs
    return out.transpose(1, 2).contiguous(), RankOne(update, into, total)


def mamba1(
    inputs: Tensor, step: Tensor, rate: Tensor, into: Tensor, state: Tensor, parent: Tensor, max_depth: int
) -> Tensor:
    """The states [B, N, C, S] of Mamba-1 at all nodes of a tree, level by level (Gu and Dao, 2023, equation 2).

    Args:
        inputs, step: x and dt [B, C, N], dt after bias and softplus.
        rate: A [C, S].
        into: B [B, S, N].
        state: [B, C, S].
        parent: [B or 1, N] each node's parent; the root's is itself.
        max_depth: of the tree."""
    decay, added = _of_nodes(inputs, step, rate, into, state.dtype)
    parent = parent.expand(len(inputs), -1)[:, :, None, None].expand_as(decay)
    root = torch.arange(decay.shape[1], device=decay.device)[:, None, None] == 0
    found = decay * state[:, None] + added
    for _ in range(max_depth):  # each round is right one level deeper
        found = decay * torch.where(root, state[:, None], found.gather(1, parent)) + added
    return found


def mamba1_text(inputs: Tensor, step: Tensor, rate: Tensor, into: Tensor, state: Tensor) -> Tensor:
    """The same states [B, N, C, S] for a piece of text, token by token."""
    decay, added = _of_nodes(inputs, step, rate, into, state.dtype)
    for token in range(decay.shape[1]):
        state = decay[:, token] * state + added[:, token]
        added[:, token] = state
    return added


def _of_nodes(inputs: Tensor, step: Tensor, rate: Tensor, into: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The decay, and what is added to the state, [B, N, C, S], at each node."""
    inputs, step, into = (each.to(dtype).transpose(1, 2) for each in (inputs, step, into))
    return (step[..., None] * rate.to(dtype)).exp(), (step * inputs)[..., None] * into[:, :, None]


def softplus(step: Tensor, bias: Tensor | None, apply: bool) -> Tensor:
    """Mamba's step sizes from its projections: dt + bias, through softplus if `apply`."""
    step = step if bias is None else step + bias.to(step.dtype)
    return F.softplus(step) if apply else step
