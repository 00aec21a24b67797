"""What recurrent layers compute over trees, and the states that paths leave, against their recurrences node by node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.layers import functions
from decode.layers.functions import StateOfEach, Update
from decode.layers.reading import Reading
from decode.topology import Topology
from tests.helpers import random_tree

B, N, H, GROUPS, K, V = 2, 14, 4, 2, 6, 5
ERROR = 1e-12  # rounding of float64 in sums of so few numbers
TREES = {"tree": [random_tree(N - 1, 3)], "chain": None, "each row": [random_tree(N - 1, 1), random_tree(N - 1, 2)]}


@pytest.fixture(params=TREES)
def topology(request: Any) -> Topology:
    trees = TREES[request.param]
    if trees is None:
        depth = torch.arange(N)[None]
        return Topology.from_parents((depth - 1).clamp_min(0), depth, N - 1, 1)
    parts = [(tree.parent, tree.depth) for tree in trees]
    parent, depth = (torch.stack(part) for part in zip(*parts, strict=True))
    return Topology.from_parents(parent, depth, int(depth.max()), 9)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_nodes(topology: Topology, start: Tensor, after: Callable[[int, int, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """The outputs [B, N, ...] and states [B, N, ...] of a recurrence `after(row, node, state before)`."""
    outs, states = [], []
    for row in range(B):
        parent, found = topology.parent.expand(B, -1)[row].tolist(), list[tuple[Tensor, Tensor]]()
        for node in range(N):
            found.append(after(row, node, start[row] if node == 0 else found[parent[node]][1]))
        outs.append(torch.stack([out for out, _ in found]))
        states.append(torch.stack([state for _, state in found]))
    return torch.stack(outs), torch.stack(states)


def require_commits(update: Update, topology: Topology, start: Tensor, states: Tensor) -> None:
    """The state after a path to each node, beside a row that keeps its state."""
    above = topology.ancestors.expand(B, -1, -1)
    for node in range(N):
        state, on_path = start.clone(), above[:, node].clone()
        on_path[1] = False
        update.apply(state, torch.tensor([node, 0]), on_path)
        assert (state[0] - states[0, node]).abs().max() < ERROR
        assert state[1].equal(start[1])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_gated_delta_rule(topology: Topology, by_channel: bool, norm: bool) -> None:
    """GDN with one decay for each head, and KDA with one for each channel; query heads serve several value heads."""
    query, key, value = rand(B, N, GROUPS, K), rand(B, N, GROUPS, K, seed=1), rand(B, N, H, V, seed=2)
    decay = -rand(B, N, H, *([K] if by_channel else []), seed=3).abs()
    beta, start = rand(B, N, H, seed=4).sigmoid(), rand(B, H, K, V, seed=5)
    out, update = functions.gated_delta(query, key, value, decay, beta, start, topology.ancestors, norm)
    query, key = (each.repeat_interleave(H // GROUPS, 2) for each in (query, key))
    if norm:
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))

    def after(row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        at = row, node
        state = state * (decay[at] if by_channel else decay[at][:, None])[..., None].exp()
        added = beta[at][:, None] * (value[at] - (state * key[at][..., None]).sum(1))
        state = state + key[at][..., None] * added[:, None]
        return (state * query[at][..., None]).sum(1) / K**0.5, state

    outs, states = by_nodes(topology, start, after)
    assert (out - outs).abs().max() < ERROR
    require_commits(update, topology, start, states)


def test_mamba_2(topology: Topology) -> None:
    x, step, rate = rand(B, N, H, K), rand(B, N, H, seed=1).abs(), -rand(H, seed=2).abs()
    into, out_of, skip = rand(B, N, GROUPS, V, seed=3), rand(B, N, GROUPS, V, seed=4), rand(H, seed=5)
    start = rand(B, H, K, V, seed=6)
    out, update = functions.mamba2(x, step, rate, into, out_of, skip, start, topology.ancestors)
    into, out_of = (each.repeat_interleave(H // GROUPS, 2) for each in (into, out_of))

    def after(row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        at = row, node
        state = state * (step[at] * rate).exp()[:, None, None]
        state = state + (step[at][:, None] * x[at])[..., None] * into[at][:, None]
        return (state * out_of[at][:, None]).sum(-1) + skip[:, None] * x[at], state

    outs, states = by_nodes(topology, start, after)
    assert (out - outs).abs().max() < ERROR
    require_commits(update, topology, start, states)


def test_mamba_1(topology: Topology) -> None:
    """Over trees level by level, and over a text token by token."""
    x, step, rate = rand(B, H, N), rand(B, H, N, seed=1).abs(), -rand(H, V, seed=2).abs()
    into, start = rand(B, V, N, seed=3), rand(B, H, V, seed=4)
    found = functions.mamba1(x, step, rate, into, start, topology.parent, topology.max_depth)

    def after(row: int, node: int, state: Tensor) -> tuple[Tensor, Tensor]:
        at = row, slice(None), node
        state = state * (step[at][:, None] * rate).exp() + (step[at] * x[at])[:, None] * into[at]
        return state, state

    _, states = by_nodes(topology, start, after)
    assert (found - states).abs().max() < ERROR
    require_commits(StateOfEach(found), topology, start, states)
    if topology.max_depth == N - 1:
        assert (functions.mamba1_text(x, step, rate, into, start) - states).abs().max() < ERROR


@pytest.mark.parametrize("width", [2, 4, 7])
def test_a_convolution_reads_ancestors(topology: Topology, width: int) -> None:
    text, nodes, weight, bias = rand(B, H, width), rand(B, H, N, seed=1), rand(H, width, seed=2), rand(H, seed=3)
    out = functions.convolved(torch.cat([text, nodes], dim=-1), Reading(N, topology, None).taps(width), weight, bias)
    for row in range(B):
        for node in range(N):
            path = [at for at in topology.paths.expand(B, -1, -1)[row, node].tolist() if at >= 0]
            line = torch.cat([text[row], nodes[row][:, path]], dim=-1)[:, -width:]
            assert (out[row, :, node] - (line * weight).sum(-1) - bias).abs().max() < ERROR
