"""medusa/heads/context_kv.py: one softmax over the keys of the text and of a path, compared with a concatenation."""

from __future__ import annotations

import pytest
import torch

from medusa.heads.context_kv import ContextKV, Rope
from medusa.heads.inputs import visible

B, A, S, D, Q, J = 2, 3, 5, 4, 6, 3
T, F = True, False


def tensors(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def side_by_side(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, own_keys: torch.Tensor, own_values: torch.Tensor
) -> torch.Tensor:
    """Attention for one query and head: query [D], keys and values [n, D] of the text, [J, D] of the path -> [D]."""
    weights = (torch.cat([keys, own_keys]) @ query * D**-0.5).softmax(-1)
    return weights @ torch.cat([values, own_values])


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("shared_mask", [False, True])
@pytest.mark.parametrize("length", [S, 0])
def test_text_keys_and_path_keys_share_a_softmax(chosen: bool, shared_mask: bool, length: int) -> None:
    keys, values = tensors(B, A, S, D)[:, :, :length], tensors(B, A, S, D, seed=1)[:, :, :length]
    query, own_keys, own_values = tensors(B, Q, A, D, seed=2), tensors(B, Q, J, A, D, seed=3), tensors(B, Q, J, A, D)
    seen = tensors(B, 1 if shared_mask else Q, S, seed=4)[..., :length] > 0
    positions = torch.zeros(B, Q)
    place = torch.tensor([0, 3, 4, 7, 11]) if chosen else None
    context_kv = ContextKV([(keys, values)], seen, positions, J, Rope(D), place if not shared_mask else None)

    def pick(states: torch.Tensor) -> torch.Tensor:
        return states if context_kv.place is None else states.flatten(0, 1)[place]

    scores = torch.einsum("bqad,bqjad->bqaj", query, own_keys)
    of_text, weights = context_kv.attend(pick(query), pick(scores))
    found = of_text + torch.einsum("...aj,...jad->...ad", weights, pick(own_values))
    expected = torch.empty(B, Q, A, D, dtype=query.dtype)
    for row, at, head in torch.cartesian_prod(torch.arange(B), torch.arange(Q), torch.arange(A)).tolist():
        there = seen[row, 0 if shared_mask else at]
        expected[row, at, head] = side_by_side(
            query[row, at, head],
            keys[row, head, there],
            values[row, head, there],
            own_keys[row, at, :, head],
            own_values[row, at, :, head],
        )
    torch.testing.assert_close(found, pick(expected))


def test_gradients_reach_every_input() -> None:
    keys, values, own = (tensors(1, 1, 2, 2, seed=n).requires_grad_() for n in range(3))
    query = tensors(1, 2, 1, 2, seed=5).requires_grad_()
    seen = torch.ones(1, 1, 2, dtype=torch.bool)

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        keys, values, own, query = inputs
        of_text, weights = ContextKV([(keys, values)], seen, torch.zeros(1, 2), 1, Rope(2)).attend(
            query, (query * own).sum(-1)[..., None]
        )
        return of_text + weights * own

    assert torch.autograd.gradcheck(attend, (keys, values, own.transpose(1, 2).detach().requires_grad_(), query))


def test_visible_positions() -> None:
    documents = torch.tensor([[0, 0, 1, 1]])
    assert visible(4, documents, documents.device).tolist() == [
        [[T, F, F, F], [T, T, F, F], [F, F, T, F], [F, F, T, T]]
    ]
    assert visible(4, documents, documents.device, before=1).tolist() == [
        [[F, F, F, F], [T, F, F, F], [F, F, F, F], [F, F, T, F]]
    ]
    assert visible(2, None, documents.device).tolist() == [[[T, F], [T, T]]]
