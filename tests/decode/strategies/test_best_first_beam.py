"""decode/strategies/best_first_beam.py: the text of beam search with fewer calls of the model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import decode.strategies.best_first_beam
from decode.reader import Reader
from decode.strategies.best_first_beam import (
    Hypothesis,
    OnTree,
    Partial,
    Search,
    WholeTexts,
    best_first_beam,
    scorer_for,
)
from medusa.errors import RequestError, RunError
from medusa.tree_support import longrope_boundary
from tests.helpers import VOCAB, random_ids, tiny_model

PROMPT = random_ids(7, seed=3)
NEW = 7


class Obvious:
    """Textbook beam search: k beginnings of one length at a time, every continuation scored and sorted.

    A text that ends counts if it is among the k best continuations of its length, and leaves its place to others."""

    def __init__(self, model: Any, prompt: list[int], k: int, new: int, penalty: float, ends: set[int]) -> None:
        self.model, self.prompt, self.calls = model, prompt, 0
        self.finished: list[tuple[float, list[int]]] = []
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for length in range(1, new + 1):
            candidates = []
            for score, ids in beams:
                for token, log_p in enumerate(self.log_p(ids)):
                    candidates.append((score + log_p, [*ids, token]))
            candidates.sort(key=lambda entry: -entry[0])
            over = [entry[1][-1] in ends or length == new for entry in candidates]
            for (score, ids), ended in list(zip(candidates, over, strict=True))[:k]:
                if ended:
                    self.finished.append((score / length**penalty, ids))
            beams = [entry for entry, ended in zip(candidates, over, strict=True) if not ended][:k]
        self.finished.sort(key=lambda entry: -entry[0])

    @torch.no_grad()
    def log_p(self, ids: list[int]) -> list[float]:
        self.calls += 1
        logits = self.model(input_ids=torch.tensor([self.prompt + ids]), use_cache=False).logits[0, -1]
        return logits.float().log_softmax(-1).tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    """A model without confident predictions, so that beams differ."""
    return tiny_model("llama", initializer_range=0.2, dtype=torch.float64)


def same(found: Search, expected: list[tuple[float, list[int]]]) -> None:
    assert [hypothesis.ids for hypothesis in found.hypotheses] == [ids for _, ids in expected]
    for hypothesis, (score, _) in zip(found.hypotheses, expected, strict=True):
        assert math.isclose(hypothesis.score, score, abs_tol=1e-4)


@pytest.mark.parametrize(("k", "penalty"), [(1, 1.0), (2, 0.6), (5, 0.0), (5, -0.5)])
def test_hypotheses_equal_a_simple_beam_search(model: Any, k: int, penalty: float) -> None:
    """All k finished texts are equal and in order, for both scores, any batch size and two kinds of ends."""
    ends = [*range(0, VOCAB, 7), 9]
    expected = Obvious(model, PROMPT, k, NEW, penalty, {*ends})
    lengths = {len(ids) for _, ids in expected.finished[:k]}
    assert k == 1 or len(lengths) > 1, "all texts are of one length: no power"
    options = {"num_beams": k, "max_new_tokens": NEW, "length_penalty": penalty, "eos_token_id": ends}
    for batch_size in (1, 4):
        found = best_first_beam(model, PROMPT, **options, num_return_sequences=k, batch_size=batch_size)
        same(found, expected.finished[:k])
        best = best_first_beam(model, torch.tensor([PROMPT]), **options, batch_size=batch_size)
        same(best, expected.finished[:1])
        assert best.calls <= found.calls <= expected.calls
        assert best.read >= best.calls
        if batch_size > 1 and k > 1:
            assert best.forwards < best.calls


@pytest.mark.parametrize(("k", "penalty"), [(2, 1.0), (4, 0.0)])
def test_hypotheses_equal_transformers_beam_search(model: Any, k: int, penalty: float) -> None:
    for seed in range(2):
        ids = torch.tensor([random_ids(5 + seed, seed)])
        options = {"num_beams": k, "max_new_tokens": 12, "length_penalty": penalty, "eos_token_id": 9}
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            early_stopping="never",
            pad_token_id=0,
            num_return_sequences=k,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        found = best_first_beam(model, ids, num_return_sequences=k, **options)
        for hypothesis, row, score in zip(found.hypotheses, theirs.sequences, theirs.sequences_scores, strict=True):
            new = row[ids.shape[1] :].tolist()
            assert new[: len(hypothesis.ids)] == hypothesis.ids
            assert not any(new[len(hypothesis.ids) :]), "padding"
            assert math.isclose(hypothesis.score, float(score), abs_tol=1e-4)


def test_best_first_needs_fewer_calls_than_beam_search(model: Any) -> None:
    """When a text ends early, worse beginnings are never read; beam search reads a whole beam of each length."""
    expected = Obvious(model, PROMPT, 5, NEW, 0.0, {9})
    found = best_first_beam(model, PROMPT, num_beams=5, max_new_tokens=NEW, eos_token_id=9)
    assert found.calls < expected.calls / 2
    assert found.calls < Search([Hypothesis([1] * NEW, 0.0, 0.0, "length")]).beam_calls(5) == 1 + 5 * (NEW - 1)


def test_without_an_end_token_texts_have_the_maximum_length(model: Any) -> None:
    (found,) = best_first_beam(model, PROMPT, num_beams=3, max_new_tokens=5, eos_token_id=-1).hypotheses
    assert (len(found.ids), found.finish_reason) == (5, "length")
    same_text = Obvious(model, PROMPT, 3, 5, 0.0, set()).finished[0]
    assert found.ids == same_text[1]
    short = tiny_model("llama", max_position_embeddings=10)
    (found,) = best_first_beam(short, PROMPT, num_beams=2, max_new_tokens=50, eos_token_id=-1).hypotheses
    assert len(found.ids) == 3, "to the end of the context"


@pytest.mark.parametrize("family", ["mistral, window", "gemma3_text", "llama4_text", "gpt2", "deepseek_v3", "bloom"])
def test_models_of_all_kinds(family: str) -> None:
    """Windows and chunks go by position, not by slot; ALiBi models, without tree support, read each text again, and
    Llama 4, which scales queries by slot."""
    model = tiny_model(family)
    prompt = random_ids(9, seed=1)
    scorer = scorer_for(model, prompt)
    assert isinstance(scorer, WholeTexts if family in ("bloom", "llama4_text") else OnTree)
    expected = Obvious(model, prompt, 3, 5, 0.0, {9})
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 5, "eos_token_id": 9, "batch_size": 3}
    found = best_first_beam(model, prompt, num_return_sequences=3, **options)
    same(found, expected.finished[:3])
    assert found.calls > 6, "no beginning was left for another one: no power"


def test_texts_on_both_sides_of_longropes_boundary_are_scored_apart() -> None:
    """The longest text of a forward decides how all are rotated."""
    model = tiny_model("phi3, longrope")
    boundary, prompt = longrope_boundary(model), random_ids(28)
    assert boundary is not None
    score, short, long = (
        WholeTexts(model, prompt),
        Partial((1, 2)),
        Partial(tuple(range(3, 4 + boundary - len(prompt)))),
    )
    with torch.no_grad():
        together, alone = score([short, long]), torch.cat([score([short]), score([long])])
    assert len(prompt) + len(short.ids) <= boundary < len(prompt) + len(long.ids)
    torch.testing.assert_close(together, alone)


def test_a_wrong_mask_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: beginnings attend to everything read before them."""
    masks = Reader.grown_masks
    monkeypatch.setattr(Reader, "grown_masks", lambda *args: torch.zeros_like(masks(*args)))
    found = best_first_beam(model, PROMPT, num_beams=5, max_new_tokens=NEW, eos_token_id=9)
    assert abs(found.hypotheses[0].score - Obvious(model, PROMPT, 5, NEW, 0.0, {9}).finished[0][0]) > 1e-3


def test_the_queue_can_be_bounded(model: Any) -> None:
    options: dict[str, Any] = {"num_beams": 4, "max_new_tokens": NEW, "eos_token_id": 9}
    free = best_first_beam(model, PROMPT, **options)
    assert free.dropped == 0
    bound = best_first_beam(model, PROMPT, max_queued=4, **options)
    assert bound.dropped > 0
    assert bound.hypotheses[0].score <= free.hypotheses[0].score + 1e-6
    assert best_first_beam(model, PROMPT, max_queued=1000, **options).hypotheses == free.hypotheses


def test_unsupported_requests_are_rejected(model: Any) -> None:
    for options, said in (
        ({"num_beams": 0}, "num_beams is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_beams": 2, "num_return_sequences": 3}, "2 beams give no more"),
        ({"max_queued": 3}, "at least num_beams, 4"),
    ):
        with pytest.raises(RequestError, match=said):
            best_first_beam(model, PROMPT, **options)
    with pytest.raises(RequestError, match="empty"):
        best_first_beam(model, [])
    with pytest.raises(RequestError, match=str(VOCAB)):
        best_first_beam(model, [VOCAB])
    queue = decode.strategies.best_first_beam._Queue(1, 3, 0.0, 1)
    queue.taken.update({1: 1, 2: 1})
    with pytest.raises(RunError, match="max_queued 1 dropped"):
        decode.strategies.best_first_beam._search(WholeTexts(model, PROMPT), queue, set(), 1, 1)
