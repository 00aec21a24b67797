"""medusa/attention.py: single queries give the attention that others give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from medusa import attention as module
from medusa.attention import attention

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}  # a few times the rounding of a result


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("masked", ["", "additive", "seen", "one for all rows"])
@pytest.mark.parametrize("few", [0, 3], ids=["AMD", "AMX"])
def test_it_is_attention(
    few: int, heads: tuple[int, int], queries: int, masked: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It equals softmax(q k / sqrt(D)) v of each head, written out in float64; sizes of keys and values may differ."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "FEW_HEADS", few)
    count, groups = heads
    query, key = torch.randn(3, count, queries, 8, dtype=dtype), torch.randn(3, groups, 20, 8, dtype=dtype)
    value = torch.randn(3, groups, 20, 12 if dtype == torch.float64 else 8, dtype=dtype)
    seen = torch.rand(1 if masked == "one for all rows" else 3, 1, queries, 20) < 0.5
    seen[..., 0] = True  # a softmax needs something
    mask = {"": None, "seen": seen}.get(masked, torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -1e30))
    wide = [states.double().repeat_interleave(count // groups, dim=1) for states in (key, value)]
    scores = query.double() @ wide[0].transpose(-1, -2) * 0.5
    weights = (scores if mask is None else scores.masked_fill(~seen, float("-inf"))).softmax(-1)
    found = attention(query, key, value, mask, 0.5)
    assert found.shape == (3, count, queries, value.shape[-1])
    torch.testing.assert_close(found.double(), weights @ wide[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("few", "heads", "form"),
    [(0, 6, (1, 6, 2, 8)), (0, 2, (1, 2, 3, 8)), (3, 6, (1, 6, 1, 8)), (3, 2, (1, 6, 1, 8)), (3, 1, (1, 1, 6, 8))],
)
def test_single_queries_have_the_form_that_the_processor_computes_fastest(
    few: int, heads: int, form: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's kernel takes several times as long for one query as for two on AMD, and the reverse with AMX."""
    seen, stock = [], F.scaled_dot_product_attention
    monkeypatch.setattr(module, "FEW_HEADS", few)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda query, *r, **k: seen.append(query) or stock(query, *r, **k)
    )
    query, keys, values = torch.randn(1, 6, 1, 8), *torch.randn(2, 1, heads, 20, 8)
    attention(query.bfloat16(), keys.bfloat16(), values.bfloat16(), None)
    assert [tuple(query.shape) for query in seen] == [form]
