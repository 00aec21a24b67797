"""Packed rows and flash attention: the lengths that a kernel gets, and equality with the dense mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from medusa.backbone import Backbone
from medusa.errors import RequestError
from tests.helpers import random_ids, tiny_model
from train.config import FLASH, TrainConfig
from train.data.packing import positions_of
from train.states import states_by_row

STUB = "flash_attention_of_documents"
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3, 3, 4, -1, -1]])


@pytest.fixture
def calls() -> Iterator[list[dict[str, Any]]]:
    """Register an attention under a name of flash attention, and return the keywords of its calls.

    It attends document by document, in the dtype of its inputs; the real kernels need a GPU and 16-bit numbers."""
    seen: list[dict[str, Any]] = []

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, **rest: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        assert query.shape[0] == 1, "one row"
        if "cu_seq_lens_q" not in rest:  # the test of a backbone's first use, of one text
            out = F.scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2), None
        seen.append(rest)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        lengths = rest["cu_seq_lens_q"].diff().tolist()
        parts = zip(*(part.split(lengths, dim=2) for part in (query, key, value)), strict=True)
        window = rest.get("sliding_window") or query.shape[2]
        out = []
        for part in parts:
            seen_by = torch.ones(part[0].shape[2], part[0].shape[2], dtype=torch.bool).tril().triu(1 - window)
            out.append(F.scaled_dot_product_attention(*part, attn_mask=seen_by, scale=scaling))
        return torch.cat(out, dim=2).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(STUB, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(STUB, ALL_MASK_ATTENTION_FUNCTIONS[FLASH])
    yield seen
    del ALL_ATTENTION_FUNCTIONS._global_mapping[STUB], ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[STUB]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
@torch.no_grad()
def test_hidden_states_by_lengths_equal_those_by_the_dense_mask(family: str, calls: list[dict[str, Any]]) -> None:
    ids = torch.tensor([random_ids(10), random_ids(10, seed=1)])
    positions = torch.stack([positions_of(row) for row in DOCUMENTS])
    model = tiny_model(family)
    dense = states_by_row(Backbone(model), ids, positions)
    assert not calls
    alone = Backbone(model).hidden_states(ids[:1, 3:8], use_cache=False)
    torch.testing.assert_close(dense[:1, 3:8], alone, rtol=1e-5, atol=1e-5)  # the mask keeps documents apart
    model.config._attn_implementation_internal = STUB
    by_lengths = states_by_row(Backbone(model), ids, positions)
    torch.testing.assert_close(by_lengths, dense, rtol=1e-5, atol=1e-5)  # sums in float32 in another order
    for call in calls:
        assert call["cu_seq_lens_q"].tolist() == call["cu_seq_lens_k"].tolist() == [0, 3, 8, 10, 17, 18, 20]
        assert call["cu_seq_lens_q"].dtype == torch.int32
        assert call["max_length_q"] == call["max_length_k"] == 7
    assert len(calls) == model.config.num_hidden_layers


def test_flash_attention_without_its_package_is_refused_before_loading(no_weights: None) -> None:
    from train.check import check

    content = {"backbone": "demo", "data": "demo", "output_dir": "unused", "attention": FLASH}
    config = TrainConfig.model_validate(content)
    assert config.load_options.attention is None  # the backbone is loaded with sdpa, and trained with flash attention
    with pytest.raises(RequestError, match="attention: flash_attention_2 needs a GPU and the package flash-attn"):
        check(config, quiet=True)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Refuse to load weights, and use data that exist."""
    (tmp_path / "demo").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("train.check.require_data", lambda config: None)
    monkeypatch.setattr("train.build.load_backbone", lambda *args: pytest.fail("weights were loaded"))
