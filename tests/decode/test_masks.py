"""decode/topology.py: masks drawn by hand, and masks of random drafts compared with a walk over nodes and slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig

from decode import generate
from decode.drafters.model import DraftModel
from decode.reader import tree_masks, visible_slots
from decode.topology import Topology
from medusa import Tree
from medusa.tree_support import FULL_LAYER, LayerKind, LayerKinds
from tests.helpers import left_padded, random_heads, random_ids, random_tree, tiny_model, weekly

T, F = True, False
# root 0 with children 1 and 2; node 3 hangs under 1
SMALL = Topology.of(Tree.from_paths([[0], [1], [0, 0]]))


def visible(topology: Topology, lengths: list[int], kind: LayerKind = FULL_LAYER) -> Tensor:
    return visible_slots(topology, torch.tensor(lengths), max(lengths) + topology.num_nodes, kind)


def test_a_node_attends_to_the_text_its_ancestors_and_itself() -> None:
    """The nodes of a short row directly follow its text; only longer rows use the slots after them."""
    three, one = visible(SMALL, [3, 1])
    assert three.tolist() == [
        # the text | 0  1  2  3
        [T, T, T, T, F, F, F],
        [T, T, T, T, T, F, F],
        [T, T, T, T, F, T, F],
        [T, T, T, T, T, F, T],
    ]
    assert one.tolist() == [
        # text | 0  1  2  3 | beyond
        [T, T, F, F, F, F, F],
        [T, T, T, F, F, F, F],
        [T, T, F, T, F, F, F],
        [T, T, T, F, T, F, F],
    ]


# The text has four tokens; nodes 1 and 2 (slots 5 and 6) share position 5, and node 3 (slot 7) has position 6.
LIMITED = {
    "window 3": (  # the node's position p, p - 1 and p - 2
        LayerKind(window=3),
        [
            # position 0 1 2 3 | 4 5 5 6
            [F, F, T, T, T, F, F, F],
            [F, F, F, T, T, T, F, F],
            [F, F, F, T, T, F, T, F],
            [F, F, F, F, T, T, F, T],
        ],
    ),
    "chunks of 3": (  # positions 0-2, 3-5 and from 6 on
        LayerKind(chunk=3),
        [
            # position 0 1 2 3 | 4 5 5 6
            [F, F, F, T, T, F, F, F],
            [F, F, F, T, T, T, F, F],
            [F, F, F, T, T, F, T, F],
            [F, F, F, F, F, F, F, T],
        ],
    ),
}


@pytest.mark.parametrize("name", LIMITED)
def test_windows_and_chunks_count_positions_not_slots(name: str) -> None:
    kind, expected = LIMITED[name]
    assert visible(SMALL, [4], kind)[0].tolist() == expected


def test_a_window_ends_inside_a_path_by_depth_not_by_index() -> None:
    """Nodes 2, 3 and 4 form a path at depths 1, 2 and 3; with window 2 the last attends to its parent and itself."""
    tree = Tree.from_paths([[0], [1], [1, 0], [1, 0, 0]])
    assert visible(Topology.of(tree), [1], LayerKind(window=2))[0].tolist() == [
        # text | 0  1  2  3  4
        [T, T, F, F, F, F],
        [F, T, T, F, F, F],
        [F, T, F, T, F, F],
        [F, F, F, T, T, F],
        [F, F, F, F, T, T],
    ]


KINDS = ["full_attention", "sliding_attention", "chunked_attention"]


def config_of(kind: str) -> Any:
    """A configuration with the layers that `kind` names."""
    config = LlamaConfig(sliding_window=4, attention_chunk_size=5)
    if kind == "hybrid":
        config.layer_types = KINDS
        return config
    if kind != "sliding_attention":
        config.sliding_window = None
    if kind != "chunked_attention":
        config.attention_chunk_size = None
    return config


def slowly_visible(topology: Topology, row: int, length: int, slots: int, kind: str) -> list[list[bool]]:
    """The definition, slot by slot."""
    at = 0 if topology.is_shared else row
    parent, depth = topology.parent[at].tolist(), topology.depth[at].tolist()

    def sees(node: int, slot: int) -> bool:
        own, position = length + depth[node], slot
        if slot >= length:
            target, above = slot - length, node
            while above and above != target:
                above = parent[above]
            if above != target:
                return False
            position = length + depth[target]
        if kind == "sliding_attention":
            return own - position < 4
        return kind != "chunked_attention" or own // 5 == position // 5

    return [[sees(node, slot) for slot in range(slots)] for node in range(topology.num_nodes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_masks_equal_the_definition(kind: str, dtype: torch.dtype) -> None:
    """Shared trees and one per row, ragged rows, wider windows than the text needs; 0 or the dtype's minimum.

    Models with `layer_types` look up masks by kind; all other models need one tensor."""
    rng = random.Random(0)
    for lengths in ([1], [3, 3], [7, 2, 5], [24, 1]):
        tree = random_tree(12, seed=len(lengths))
        for topology in (Topology.of(tree), own_trees(len(lengths))):
            slots = max(lengths) + topology.num_nodes + rng.choice([0, 9])
            got = tree_masks(LayerKinds(config_of(kind)), dtype, topology, torch.tensor(lengths), slots)
            assert isinstance(got, dict) == (kind == "hybrid")
            by_kind = got if isinstance(got, dict) else {kind: got}
            assert set(by_kind) == (set(KINDS) if kind == "hybrid" else {kind})
            for name, mask in by_kind.items():
                expected = torch.tensor(
                    [slowly_visible(topology, row, n, slots, name) for row, n in enumerate(lengths)]
                )
                assert mask.dtype == dtype
                assert torch.equal(mask[:, 0] == 0, expected)
                assert (mask[:, 0][~expected] == torch.finfo(dtype).min).all()


def own_trees(rows: int) -> Topology:
    """A tree for each row, as in dynamic trees."""
    trees = [random_tree(9, seed, max_depth=4) for seed in range(rows)]
    parent, depth = (torch.stack([getattr(tree, of) for tree in trees]) for of in ("parent", "depth"))
    return Topology.from_parents(parent, depth, 4, 9)


# Kernels on a GPU fail, or read wrong numbers, if a mask in memory is not aligned.


def is_aligned(mask: Tensor) -> bool:
    """Whether the mask starts at a multiple of 16 bytes, and its rows are a multiple of 8 elements apart."""
    rows = [stride for stride, size in zip(mask.stride()[:-1], mask.shape[:-1], strict=True) if size > 1]
    starts = mask.storage_offset() * mask.itemsize % 16 == 0 and mask.data_ptr() % 16 == 0
    return starts and mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_are_aligned_for_every_length_of_text(dtype: torch.dtype) -> None:
    """Also with windows, chunks and ragged rows."""
    topology, layers = Topology.of(random_tree(40)), LayerKinds(config_of("hybrid"))
    for length in (*range(1, 100), *range(2000, 2016)):
        for lengths in ([length], [length, length // 2 + 1]):
            masks = tree_masks(layers, dtype, topology, torch.tensor(lengths), length + 41)
            assert isinstance(masks, dict)
            assert all(map(is_aligned, masks.values())), lengths


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The masks that steps hand to PyTorch's attention. Boolean masks, of prefills, are left out: it copies them."""
    masks: list[Tensor] = []
    stock: Callable[..., Tensor] = functional.scaled_dot_product_attention

    def recording(*args: Any, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if attn_mask is not None and attn_mask.is_floating_point():
            masks.append(attn_mask)
        return stock(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recording)
    return masks


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gemma3_text", {}),
        ("deepseek_v3", {}),
        ("llama", {"kind": "eagle"}),
        *weekly(("gpt2", {}), ("llama4_text", {}), ("llama", {"prefix_layers": 1})),
    ],
)
def test_steps_hand_aligned_masks_to_attention(family: str, settings: Any, attended: list[Tensor]) -> None:
    """With and without grouped queries, windows and chunks; one row, and rows of different lengths."""
    model = tiny_model(family, dtype=torch.bfloat16 if family == "llama" else torch.float32)
    heads = random_heads(model, **settings)
    for prompts in ([random_ids(7)], [random_ids(12), random_ids(9)]):
        for tree in ("topk:3,2", "dynamic:7"):
            generate(model, heads, **left_padded(prompts), tree=tree, max_new_tokens=12, do_sample=False)
    assert len(attended) > 40
    assert all(map(is_aligned, attended))


def test_a_draft_model_hands_aligned_masks_to_attention(attended: list[Tensor]) -> None:
    model, small = tiny_model("llama"), tiny_model("llama", seed=1, num_hidden_layers=1)
    prompts = left_padded([random_ids(12), random_ids(9)])
    for tree in (Tree.chain(3), Tree.top_k([2, 2])):
        generate(model, **prompts, drafter=DraftModel(small, tree), max_new_tokens=12, do_sample=False)
    assert len(attended) > 20
    assert all(map(is_aligned, attended))
