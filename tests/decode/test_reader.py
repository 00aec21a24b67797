"""decode/reader.py: drafts read like one forward per path, and prompts read in pieces like in one forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode import generate, reader
from decode.cache import TreeCache
from decode.draft import Draft
from decode.reader import Reader
from decode.topology import Topology
from medusa import Tree
from medusa.backbone import Backbone, Readout
from tests.helpers import FAMILIES, left_padded, path_logits, plain, random_heads, random_ids, random_tree, tiny_model


def read(model: Any, texts: list[list[int]], capacity: int = 8) -> tuple[Reader, Readout]:
    """A reader that has read `texts`, and what it gave at their ends."""
    found = Reader(Backbone(model), TreeCache(model.config, len(texts), capacity, torch.device("cpu")))
    lengths = [len(text) for text in texts]
    ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts])
    with torch.no_grad():
        return found, found.prefill(ids, lengths)


@pytest.mark.parametrize(
    ("family", "attention"),
    [*((family, "sdpa") for family in FAMILIES if family != "gemma2"), *((f, "eager") for f in ("llama", "gemma2"))],
)
@torch.no_grad()
def test_a_draft_is_read_like_a_forward_per_path(family: str, attention: str) -> None:
    """In float64 rounding is about 1e-15; a window off by one or a wrong node gives more than 1e-2.

    The prompt is longer than every window, the tree wider than it is deep, and one row is shorter than the other.
    """
    model = tiny_model(family, dtype=torch.float64, attn_implementation=attention)
    tree, prompts = random_tree(12, seed=1), [random_ids(11, seed=2), random_ids(8, seed=3)]
    ids = [random_ids(tree.num_nodes, seed=seed) for seed in (4, 5)]
    logits = read(model, prompts)[0](Draft(torch.tensor(ids), Topology.of(tree))).logits
    for row in range(2):
        expected = path_logits(model, prompts[row], ids[row], tree)
        # Softmax is float32 in eager attention and in some norms, whatever the model's dtype: 1e-6 relative.
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
        assert (logits[row, 1:] - logits[row, :-1]).abs().max() > 0.05, "nodes do not differ: no power"


@pytest.mark.parametrize("family", ["llama", "mistral, window", "llama4_text"])
@pytest.mark.parametrize("lengths", [[11, 11], [11, 8]], ids=["even rows", "ragged rows"])
@torch.no_grad()
def test_a_root_alone_is_read_like_the_next_token(family: str, lengths: list[int]) -> None:
    """Rows of one length need no mask of ours, because the model's own one is causal."""
    model, root = tiny_model(family, dtype=torch.float64), Tree.chain(0)
    prompts = [random_ids(length, seed=row) for row, length in enumerate(lengths)]
    logits = read(model, prompts)[0](Draft(torch.tensor([[3], [4]]), Topology.of(root))).logits
    for row, prompt in enumerate(prompts):
        expected = path_logits(model, prompt, [3 + row], root)
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)  # as above


@torch.no_grad()
def test_nodes_beyond_the_context_use_valid_positions() -> None:
    """Learned positions end with the table: nodes within the table must be correct, others may have any values."""
    model = tiny_model("gpt2", dtype=torch.float64, max_position_embeddings=10)
    prompt, ids = random_ids(8), random_ids(5, seed=1)
    found, draft = read(model, [prompt])[0], Draft(torch.tensor([ids]), Topology.of(Tree.chain(4)))
    limit = found.depth_limit(draft)
    assert limit is not None
    assert limit.tolist() == [1], "the root takes position 8, and 9 is the last"
    logits = found(draft).logits[0]
    expected = path_logits(model, prompt, ids[:2], Tree.chain(1))
    torch.testing.assert_close(logits[:2], expected, rtol=1e-9, atol=1e-9)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the number of tokens of a piece in each row."""

    def of(size: int) -> None:
        monkeypatch.setattr(reader, "PIECE_TOKENS", 1)
        monkeypatch.setattr(reader, "MIN_PIECE_ROW", size)

    return of


LENGTHS = {"one row": [45], "ragged rows": [9, 31, 2, 18]}
CASES = [*((family, "ragged rows") for family in FAMILIES), ("llama", "one row"), ("gemma3_text", "one row")]


@pytest.mark.parametrize(("family", "rows"), [*CASES, ("phi3, longrope", "one row")])
def test_prompts_in_pieces_equal_one_forward(family: str, rows: str, pieces: Any) -> None:
    """Windows and chunks of 4 tokens; pieces of 5 tokens, which end within both, and of 8, which end with it. One text
    crosses the length at which longrope switches its factors, and its first piece ends before."""
    model = tiny_model(family, dtype=torch.float64)
    texts = [random_ids(length, seed=row) for row, length in enumerate(LENGTHS[rows])]
    boundary = Backbone(model).rope_boundary
    assert boundary is None or 8 < boundary < LENGTHS[rows][0]
    pieces(1000)
    whole, expected = read(model, texts)
    for size in (5, 8):
        pieces(size)
        found, readout = read(model, texts)
        assert found.cache.lengths == whole.cache.lengths == LENGTHS[rows]
        # transformers computes norms and rotary angles in float32, also in a float64 model. A wrong mask errs by 0.1.
        torch.testing.assert_close(readout, expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(found.cache.tree_layers, whole.cache.tree_layers, strict=True):
            for row, text in enumerate(texts):
                own, other = (tuple(states[row, :, : len(text)] for states in layer.read()) for layer in (ours, theirs))
                torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prefill_memory_is_bounded_by_a_piece(family: str, pieces: Any) -> None:
    """Forwards have at most one piece of tokens, and logits only of each row's last position."""
    model = tiny_model(family)
    seen: list[tuple[int, ...]] = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    logits: list[tuple[int, ...]] = []
    model.get_output_embeddings().register_forward_hook(lambda module, args, out: logits.append(tuple(out.shape)))
    Backbone(model)  # tries out, once, how the model makes its logits
    seen.clear()
    logits.clear()
    pieces(8)
    read(model, [random_ids(23), random_ids(11)])
    assert [shape[1] for shape in seen] == [8, 8, 7]
    assert all(shape[:-1].numel() <= 4 for shape in map(torch.Size, logits)), "two rows, at most two positions"


def test_the_first_piece_on_a_gpu_is_longer(pieces: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has flash attention, and later ones need a mask; here, the CPU has a GPU's number."""
    model, prompt, shapes = tiny_model("llama"), random_ids(41), list[int]()
    pieces(5)
    expected = read(model, [prompt])[1]
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(reader, "FIRST_TOKENS", {"cpu": 30, "cuda": reader.FIRST_TOKENS["cuda"]})
    torch.testing.assert_close(read(model, [prompt])[1], expected)
    assert shapes == [30, 5, 5, 1]
    assert reader.FIRST_TOKENS["cuda"] == 8192


@pytest.mark.parametrize("settings", [{}, {"kind": "eagle"}, {"prefix_layers": 1}], ids=str)
def test_the_text_after_prompts_in_pieces_is_the_same(llama: Any, settings: Any, pieces: Any) -> None:
    pieces(4)
    prompts, options = [random_ids(30), random_ids(7, seed=1)], {"max_new_tokens": 20, "do_sample": False}
    out = generate(llama, random_heads(llama, **settings), **left_padded(prompts), tree="topk:3,2", **options)
    assert out[:, 30:].tolist() == [plain(llama, prompt, **options) for prompt in prompts]
