"""decode/verify.py: masks drawn by hand, and one tree forward compared with one forward per path."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from decode.verify import Verifier
from transformers import LlamaConfig

from decode.cache import TreeCache
from decode.draft import Draft
from decode.masks import MOST_KEPT, TreeMasks, visible
from decode.topology import HostTopology, Topology
from medusa import Tree
from medusa.backbone import Backbone
from medusa.tree_support import LayerKind, LayerKinds
from tests.helpers import FAMILIES, path_logits, random_ids, random_tree, tiny_model

T, F = True, False
# root 0 with children 1 and 2; node 3 hangs under 1
SMALL = Topology.of(Tree.from_paths([[0], [1], [0, 0]]))


def test_a_node_attends_to_the_text_its_ancestors_and_itself() -> None:
    assert visible(SMALL, [3])[0].tolist() == [
        # the text | 0  1  2  3
        [T, T, T, T, F, F, F],
        [T, T, T, T, T, F, F],
        [T, T, T, T, F, T, F],
        [T, T, T, T, T, F, T],
    ]


def test_rows_of_different_length() -> None:
    """The nodes of a short row directly follow its text; only longer rows use the slots after them."""
    three, one = visible(SMALL, [3, 1])
    assert torch.equal(three, visible(SMALL, [3])[0])
    assert one.tolist() == [
        # text | 0  1  2  3 | beyond
        [T, T, F, F, F, F, F],
        [T, T, T, F, F, F, F],
        [T, T, F, T, F, F, F],
        [T, T, T, F, T, F, F],
    ]


def test_windows_count_positions_not_slots() -> None:
    """Window 3 covers positions p, p - 1 and p - 2. Node 2 (slot 6) has position 5, so it attends to position 3."""
    assert visible(SMALL, [4], LayerKind(window=3))[0].tolist() == [
        # position 0 1 2 3 | 4 5 5 6
        [F, F, T, T, T, F, F, F],
        [F, F, F, T, T, T, F, F],
        [F, F, F, T, T, F, T, F],
        [F, F, F, F, T, T, F, T],
    ]


def test_a_window_may_be_shorter_than_a_path() -> None:
    assert visible(Topology.of(Tree.chain(3)), [1], LayerKind(window=2))[0].tolist() == [
        [T, T, F, F, F],
        [F, T, T, F, F],
        [F, F, T, T, F],
        [F, F, F, T, T],
    ]


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


def test_chunks_start_at_absolute_positions() -> None:
    """Chunks of 3 cover positions 0-2 and 3-5. The root at 4 attends to 3; node 3, at position 6, starts a chunk."""
    assert visible(SMALL, [4], LayerKind(chunk=3))[0].tolist() == [
        # position 0 1 2 3 | 4 5 5 6
        [F, F, F, T, T, F, F, F],
        [F, F, F, T, T, T, F, F],
        [F, F, F, T, T, F, T, F],
        [F, F, F, F, F, F, F, T],
    ]


def test_windows_in_ragged_rows() -> None:
    for window in (1, 2, 3, 5):
        rows = visible(SMALL, [4, 2], LayerKind(window=window))
        assert torch.equal(rows[0], visible(SMALL, [4], LayerKind(window=window))[0])
        assert torch.equal(rows[1, :, :6], visible(SMALL, [2], LayerKind(window=window))[0])
        assert not rows[1, :, 6:].any()


LENGTHS = ([1], [3, 3], [7, 2, 5], [255, 1], [256], [257, 300], [900, 4])


def config_of(kind: str) -> Any:
    """A configuration with the layers that `kind` names."""
    config = LlamaConfig(sliding_window=4, attention_chunk_size=5)
    if kind == "hybrid":
        config.layer_types = ["sliding_attention", "full_attention", "chunked_attention"]
        return config
    if kind != "sliding_attention":
        config.sliding_window = None
    if kind != "chunked_attention":
        config.attention_chunk_size = None
    return config


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention", "hybrid"])
def test_masks_cut_from_the_buffer_equal_the_definition(kind: str, dtype: torch.dtype) -> None:
    """Random trees and lengths, also beyond the first buffer (256 slots); 0 if visible, else the dtype's minimum."""
    rng = random.Random(0)
    for seed in range(4):
        topology = Topology.of(random_tree(rng.randint(0, 12), seed))
        masks = TreeMasks(config_of(kind), dtype, torch.device("cpu"))
        masks([2], SMALL)  # the mask of an earlier tree is no mask of this one
        for lengths in LENGTHS:
            check_masks(kind, masks(lengths, topology), lengths, topology, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention", "chunked_attention", "hybrid"])
def test_masks_of_trees_that_differ_by_row_equal_the_definition(kind: str, dtype: torch.dtype) -> None:
    """Dynamic trees: each row of a batch has its own, in every step another one."""
    masks = TreeMasks(config_of(kind), dtype, torch.device("cpu"))
    for lengths in LENGTHS:
        trees = [random_tree(9, seed, max_depth=4) for seed in range(len(lengths))]
        topology = HostTopology(*([getattr(t, of).tolist() for t in trees] for of in ("parent", "depth")), 4)
        check_masks(kind, masks(lengths, topology), lengths, topology, dtype)


def test_equal_texts_read_one_mask_of_a_tree_that_they_share() -> None:
    """For example the drafts of an n-gram drafter; copies would cost memory and time for each text."""
    tree = random_tree(9, 1, max_depth=4)
    topology = Topology.from_parents(tree.parent[None], tree.depth[None], 4, 8)
    masks = TreeMasks(config_of("full_attention"), torch.float32, torch.device("cpu"))
    mask = masks([6, 6, 6], topology)
    assert isinstance(mask, torch.Tensor)
    check_masks("full_attention", mask, [6, 6, 6], topology, torch.float32)
    assert mask.stride(0) == 0


def test_small_masks_are_kept_for_other_texts() -> None:
    """Also for forwards with gradients, which save what they read. Large masks would only take memory."""
    topology = Topology.of(random_tree(9, seed=1))
    config, cpu = config_of("full_attention"), torch.device("cpu")
    with torch.inference_mode():
        first, second, large = (
            TreeMasks(config, torch.float32, cpu)([n], topology) for n in (100, 120, MOST_KEPT // 8)
        )
    again = TreeMasks(config, torch.float32, cpu)([MOST_KEPT // 8], topology)
    for mask in (first, second, large, again):
        assert isinstance(mask, torch.Tensor)
        assert not mask.is_inference()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert large.untyped_storage().data_ptr() != again.untyped_storage().data_ptr()


def check_masks(kind: str, got: Any, lengths: list[int], topology: Topology, dtype: torch.dtype) -> None:
    by_kind = got if isinstance(got, dict) else {kind: got}
    assert set(by_kind) == {each.name for each in LayerKinds(config_of(kind)).kinds}
    for name, mask in by_kind.items():
        window = 4 if name == "sliding_attention" else None
        chunk = 5 if name == "chunked_attention" else None
        expected = visible(topology, lengths, LayerKind(name, window, chunk))
        assert mask.dtype == dtype
        assert torch.equal(mask[:, 0] == 0, expected)
        assert (mask[:, 0][~expected] == torch.finfo(dtype).min).all()


def test_masks_are_a_dict_only_for_named_layer_kinds() -> None:
    """Models with `layer_types` look up masks by kind; all other models need one tensor."""
    topology, cpu = Topology.of(Tree.chain(1)), torch.device("cpu")
    assert isinstance(TreeMasks(config_of("full_attention"), torch.float32, cpu)([2], topology), torch.Tensor)
    assert set(TreeMasks(config_of("hybrid"), torch.float32, cpu)([2], topology)) == set(
        config_of("hybrid").layer_types
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_tree_forward_equals_a_forward_per_path(family: str, attention: str) -> None:
    """In float64 rounding is about 1e-15; a window off by one or a wrong node gives more than 1e-2.

    The prompt is longer than every window, the tree wider than it is deep, and one row is shorter than the other.
    """
    if family == "gemma2":
        attention = "eager"
    model = tiny_model(family, dtype=torch.float64, attn_implementation=attention)
    backbone, tree = Backbone(model), random_tree(12, seed=1)
    prompts = [random_ids(11, seed=2), random_ids(8, seed=3)]
    cache = TreeCache(model.config, 2, capacity=40)
    padded = torch.tensor([prompts[0], prompts[1] + [0] * 3])
    backbone.forward(padded, cache, position_ids=torch.arange(11).expand(2, -1))
    cache.commit_prompt([11, 8])
    ids = [random_ids(tree.num_nodes, seed=seed) for seed in (4, 5)]
    logits = Verifier(backbone, cache)(Draft(torch.tensor(ids), Topology.of(tree))).logits
    for row in range(2):
        expected = path_logits(model, prompts[row], ids[row], tree)
        # Softmax is float32 in eager attention and in some norms, whatever the model's dtype: 1e-6 relative.
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
        assert (logits[row, 1:] - logits[row, :-1]).abs().max() > 0.05, "nodes do not differ: no power"


@torch.no_grad()
def test_nodes_beyond_the_context_use_valid_positions() -> None:
    """Learned positions end with the table: nodes within the table must be correct, others may have any values."""
    model = tiny_model("gpt2", dtype=torch.float64, max_position_embeddings=10)
    backbone, tree, prompt = Backbone(model), Tree.chain(4), random_ids(8)
    cache = TreeCache(model.config, 1, capacity=20)
    backbone.forward(torch.tensor([prompt]), cache, position_ids=torch.arange(8)[None])
    cache.commit_prompt([8])
    ids = random_ids(5, seed=1)
    verifier, draft = Verifier(backbone, cache), Draft(torch.tensor([ids]), Topology.of(tree))
    limit = verifier.depth_limit(draft)
    assert limit is not None
    assert limit.tolist() == [1], "the root takes position 8, and 9 is the last"
    logits = verifier(draft).logits[0]
    expected = path_logits(model, prompt, ids[:2], Tree.chain(1))
    torch.testing.assert_close(logits[:2], expected, rtol=1e-9, atol=1e-9)
