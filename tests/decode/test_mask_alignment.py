"""Masks of eager steps: kernels on a GPU fail, or read wrong numbers, if a mask in memory is not aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode.verify import Verifier
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from decode import generate, masks
from decode.cache import TreeCache
from decode.draft import Draft
from decode.drafters.model import DraftModel
from decode.masks import TreeMasks
from decode.topology import Topology
from medusa import Tree
from medusa.backbone import Backbone
from medusa.tree import load_tree
from medusa.tree_support import Mask
from tests.helpers import left_padded, random_heads, random_ids, random_tree, tiny_model

STATIC = Topology.of(load_tree("mc_sim_7b_63", 5))
DYNAMIC = Topology.from_parents(STATIC.parent, STATIC.depth, STATIC.max_depth, STATIC.max_children)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "needs_aligned", lambda device: True)


def is_aligned(mask: Tensor) -> bool:
    """Whether the mask starts at a multiple of 16 bytes, and its rows are a multiple of 8 elements apart."""
    rows = [stride for stride, size in zip(mask.stride()[:-1], mask.shape[:-1], strict=True) if size > 1]
    starts = mask.storage_offset() * mask.itemsize % 16 == 0 and mask.data_ptr() % 16 == 0
    return starts and mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in rows)


def each(masks: Mask) -> list[Tensor]:
    return list(masks.values()) if isinstance(masks, dict) else [masks]


def test_the_check_finds_what_kernels_reject() -> None:
    whole = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert is_aligned(whole)
    assert is_aligned(whole[:, 8:24])
    assert not is_aligned(whole[:, 1:24]), "starts at byte 2"
    assert not is_aligned(torch.zeros(4, 20)), "rows of 20 elements"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topology", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_masks_are_aligned_for_every_length_of_text(topology: Topology, dtype: torch.dtype) -> None:
    """One set of masks meets all lengths in turn, as while a text grows; the 64 nodes are those of published trees."""
    masks = TreeMasks(LlamaConfig(), dtype, torch.device("cpu"))
    for length in range(1, 4097):
        mask = masks([length], topology)
        assert isinstance(mask, Tensor)
        assert mask.shape == (1, 1, 64, length + 64)
        assert is_aligned(mask), length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("topology", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_masks_of_windows_chunks_and_ragged_rows_are_aligned(topology: Topology, dtype: torch.dtype) -> None:
    """A length from each remainder of 16, at short and at long texts."""
    config = LlamaConfig(sliding_window=40, attention_chunk_size=48)
    config.layer_types = ["sliding_attention", "full_attention", "chunked_attention"]
    masks = TreeMasks(config, dtype, torch.device("cpu"))
    for length in (*range(1, 400), *range(2000, 2016), *range(4081, 4097)):
        for lengths in ([length], [length, length // 2 + 1]):
            for mask in each(masks(lengths, topology)):
                assert mask.shape == (len(lengths), 1, 64, length + 64)
                assert is_aligned(mask), lengths


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that steps hand to PyTorch's attention. Boolean masks, of prefills, are left out: it copies them."""
    masks: list[Tensor] = []
    stock: Callable[..., Tensor] = F.scaled_dot_product_attention

    def recording(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is not None and attn_mask.is_floating_point():
            masks.append(attn_mask)
        return stock(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    return masks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral, window", "gemma3_text", "llama4_text", "deepseek_v3"])
def test_steps_hand_aligned_masks_to_attention(family: str, dtype: torch.dtype, attended: list[Tensor]) -> None:
    """With and without grouped queries, windows and chunks; one row, and rows of different lengths."""
    model = tiny_model(family, dtype=dtype)
    heads = random_heads(model)
    for prompts in ([random_ids(7)], [random_ids(12), random_ids(9)]):
        for tree in ("topk:3,2", "dynamic:7"):
            generate(model, heads, **left_padded(prompts), tree=tree, max_new_tokens=12, do_sample=False)
    assert len(attended) > 40
    assert all(map(is_aligned, attended))


@pytest.mark.parametrize("settings", [{"prefix_layers": 1}, {"kind": "eagle"}, {"kind": "hydra", "prefix_layers": 1}])
def test_heads_that_look_back_hand_aligned_masks_to_attention(settings: Any, attended: list[Tensor]) -> None:
    model = tiny_model("llama")
    prompts = left_padded([random_ids(12), random_ids(9)])
    generate(model, random_heads(model, **settings), **prompts, tree="topk:3,2", max_new_tokens=12, do_sample=False)
    assert len(attended) > 20
    assert all(map(is_aligned, attended))


def test_a_draft_model_hands_aligned_masks_to_attention(attended: list[Tensor]) -> None:
    model, small = tiny_model("llama"), tiny_model("llama", seed=1, num_hidden_layers=1)
    prompts = left_padded([random_ids(12), random_ids(9)])
    for tree in (Tree.chain(3), Tree.top_k([2, 2])):
        generate(model, **prompts, drafter=DraftModel(small, tree), max_new_tokens=12, do_sample=False)
    assert len(attended) > 20
    assert all(map(is_aligned, attended))


HYBRID = {"layer_types": ["sliding_attention", "full_attention"] * 3}


@pytest.mark.parametrize(
    ("family", "settings", "kinds"), [("llama", {}, 1), ("mistral, window", {}, 1), ("gemma3_text", HYBRID, 2)]
)
@torch.no_grad()
def test_a_step_repeats_each_mask_once_for_all_layers(
    family: str, settings: Any, kinds: int, attended: list[Tensor]
) -> None:
    """Four query heads share two key heads, so attention reads a mask of twice as many rows."""
    model = tiny_model(family, num_hidden_layers=6, head_dim=16, **settings)  # heads of 8 take matrix products
    backbone, topology, cache = Backbone(model), Topology.of(random_tree(9)), TreeCache(model.config, 1, capacity=40)
    backbone.forward(torch.tensor([random_ids(12)]), cache, position_ids=torch.arange(12)[None])
    cache.commit_prompt([12])
    attended.clear()
    Verifier(backbone, cache)(Draft(torch.tensor([random_ids(10)]), topology))
    assert [tuple(mask.shape) for mask in attended] == [(1, 1, 20, 22)] * 6
    assert len({mask.data_ptr() for mask in attended}) == kinds
