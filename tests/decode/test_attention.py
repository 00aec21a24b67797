"""decode/attention.py: transformers' sdpa without its copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

from decode.attention import NAME, grouped, sdpa_grouped
from decode.cache import TreeCache
from decode.draft import Draft
from decode.prefill import read
from decode.topology import Topology
from decode.verify import Verifier
from medusa.backbone import Backbone
from tests.helpers import random_ids, random_tree, tiny_model


def verify(model: Any) -> torch.Tensor:
    tree, backbone, cache = Topology.of(random_tree(9)), Backbone(model), TreeCache(model.config, 2, capacity=40)
    with torch.no_grad():
        read(backbone, cache, torch.tensor([random_ids(12), random_ids(12, seed=1)]), [12, 7])
        ids = torch.tensor([random_ids(10, seed=2), random_ids(10, seed=3)])
        return Verifier(backbone, cache)(Draft(ids, tree)).logits


@pytest.mark.parametrize("family", ["llama", "mistral, window", "gemma3_text", "llama4_text"])
def test_it_is_sdpa_without_copies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four heads on two: the same logits, and transformers' `repeat_kv` is never called."""
    model, calls = tiny_model(family), []
    Backbone(model)  # tries out, once, how the model makes its logits
    stock = sdpa_attention.repeat_kv

    def counting(*args: Any) -> Any:
        calls.append(args)
        return stock(*args)

    monkeypatch.setattr(sdpa_attention, "repeat_kv", counting)
    found = verify(model)
    assert not calls
    with monkeypatch.context() as patch:
        for place in ("decode.verify", "decode.prefill"):
            patch.setattr(f"{place}.grouped", lambda config: torch.no_grad())
        expected = verify(model)
    assert calls, "nothing was copied in the first place: no power"
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # float32, the same sums in another order at most


def test_nothing_is_left_on_the_model() -> None:
    model = tiny_model("llama")
    seen = []

    def fails() -> None:
        with grouped(model.config):
            seen.append(model.config._attn_implementation)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen == [NAME]
    assert model.config._attn_implementation == "sdpa"
    eager = tiny_model("gemma2")
    with grouped(eager.config):
        assert eager.config._attn_implementation == "eager"


def test_without_a_mask_it_is_transformers_own() -> None:
    query, key = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    found, _ = sdpa_grouped(module, query, key, key, None, is_causal=True)
    expected, _ = sdpa_attention.sdpa_attention_forward(module, query, key, key, None, is_causal=True)
    assert torch.equal(found, expected)
