"""decode/prefill.py: a prompt read in chunks leaves the state of one forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode.prefill import prefill

from decode import prefill as prefill_module
from decode.cache import TreeCache
from decode.generation import decoding
from decode.loop import Acceptor
from decode.request import prepare
from medusa.backbone import Backbone, Readout
from tests.helpers import FAMILIES, plain, random_ids, tiny_model

LENGTHS = {"one row": [45], "even rows": [17, 17], "ragged rows": [9, 31, 2, 18]}


def read_in_pieces(
    model: Any, texts: list[list[int]], size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[TreeCache, Readout]:
    monkeypatch.setattr(prefill_module, "PIECE_TOKENS", 1)
    monkeypatch.setattr(prefill_module, "MIN_PIECE_ROW", size)
    lengths = [len(text) for text in texts]
    ids = torch.tensor([text + [0] * (max(lengths) - len(text)) for text in texts])
    cache = TreeCache(model.config, len(texts), capacity=8)
    with torch.no_grad():
        return cache, prefill(Backbone(model), cache, ids, lengths)


@pytest.mark.parametrize("rows", LENGTHS)
@pytest.mark.parametrize("family", [*FAMILIES, "phi3, longrope"])
def test_chunked_prefill_equals_one_forward(family: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and chunks of 4 tokens; prefill chunks of 5, which end within both, and of 8, which end with it."""
    if "longrope" in family and rows != "one row":
        pytest.skip("such texts are decoded alone")
    model = tiny_model(family, dtype=torch.float64)
    texts = [random_ids(length, seed=row) for row, length in enumerate(LENGTHS[rows])]
    whole, expected = read_in_pieces(model, texts, 1000, monkeypatch)
    for size in (5, 8):
        cache, found = read_in_pieces(model, texts, size, monkeypatch)
        assert cache.lengths == whole.lengths == LENGTHS[rows]
        # float64, but for norms and rotary angles that transformers computes in float32; a wrong mask errs by 0.1.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for ours, theirs in zip(cache.layers, whole.layers, strict=True):
            for row, text in enumerate(texts):
                mine, other = (layer.keys[row, :, : len(text)] for layer in (ours, theirs))
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
                mine, other = (layer.values[row, :, : len(text)] for layer in (ours, theirs))
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_the_longrope_prompt_crosses_the_boundary() -> None:
    """The test above needs a text that crosses the boundary, and chunks that end before the boundary."""
    boundary = Backbone(tiny_model("phi3, longrope")).rope_boundary
    assert boundary is not None
    assert 8 < boundary < LENGTHS["one row"][0]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prefill_memory_is_bounded_by_a_chunk(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards have at most one chunk of tokens and [C, S] masks, and logits only of each row's last position."""
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
    read_in_pieces(model, [random_ids(23), random_ids(11)], 8, monkeypatch)
    assert [shape[1] for shape in seen] == [8, 8, 7]
    assert all(shape[:-1].numel() <= 4 for shape in map(torch.Size, logits)), "two rows, at most two positions"


def test_text_after_a_chunked_prefill_is_the_same(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "MIN_PIECE_ROW", 4)
    monkeypatch.setattr(prefill_module, "PIECE_TOKENS", 4)
    prompts = [random_ids(30), random_ids(7, seed=1)]
    requests = prepare(llama, prompts, max_new_tokens=20, do_sample=False)
    begun = decoding(llama, None, requests, Acceptor("greedy"))
    begun.finish()
    assert begun.session.sequences.new_ids == [plain(llama, prompt, max_new_tokens=20) for prompt in prompts]
