"""Head accuracy equals that of a loop over single positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode.bench.methods import plain_method
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.heads.guesses import accepted
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from tests.helpers import random_heads, random_ids
from train.evaluate import TOPS, GuessCounts, OwnText, head_accuracy

HEADS = 3


@pytest.fixture(scope="module")
def texts(llama: Any) -> list[OwnText]:
    prompts = [random_ids(length, seed=length) for length in (3, 1, 6)]
    results = plain_method(llama, Settings(max_new_tokens=20))(prompts, None)
    return [OwnText(result.input_ids + result.new_ids, len(result.input_ids)) for result in results]


def by_hand(model: Any, heads: Any, texts: list[OwnText]) -> tuple[list[dict[str, Any]], int]:
    """Count one position, one head and one guess at a time."""
    hits = [dict.fromkeys(TOPS, 0) for _ in range(HEADS)]
    chained, given, positions = [0] * HEADS, [0] * HEADS, 0
    for ids, prompt_tokens in texts:
        for place in range(prompt_tokens - 1, len(ids) - HEADS - 1):
            positions += 1
            with torch.no_grad():
                hidden = model.model(input_ids=torch.tensor([ids[: place + 1]]), use_cache=False).last_hidden_state[
                    0, -1
                ]
                logits = heads(HeadInputs(hidden), model.lm_head)
            all_right = True
            for head in range(HEADS):
                guesses = logits[head].argsort(descending=True).tolist()
                truth = ids[place + head + 2]
                for top in TOPS:
                    hits[head][top] += truth in guesses[:top]
                given[head] += all_right
                all_right = all_right and guesses[0] == truth
                chained[head] += all_right
    shares = [
        {
            "head": head + 1,
            "top": {str(top): hits[head][top] / positions for top in TOPS},
            "conditional_top1": chained[head] / max(given[head], 1),
        }
        for head in range(HEADS)
    ]
    return shares, positions


@pytest.mark.parametrize("lm_head", ["own", "shared"])
def test_accuracy_equals_a_simple_loop(llama: Any, texts: list[OwnText], lm_head: str) -> None:
    heads = random_heads(llama, HEADS, lm_head=lm_head)
    for layer in heads.blocks:
        for parameter in layer.parameters():
            parameter.data *= 0.2  # near the backbone's own guess, so that some of theirs are right
    figures = head_accuracy(Backbone(llama), heads, texts)
    expected, positions = by_hand(llama, heads, texts)
    assert figures.tokens == positions
    for ours, theirs in zip(figures.heads, expected, strict=True):
        assert ours.head == theirs["head"]
        assert ours.top == pytest.approx(theirs["top"], abs=5e-5), "rounded to four digits"
        assert ours.conditional_top1 == pytest.approx(theirs["conditional_top1"], abs=5e-5)
    assert any(0 < share.top["10"] < 1 for share in figures.heads), "or nothing was compared"


def test_text_that_ends_before_the_heads_reach_counts_nothing(llama: Any) -> None:
    figures = head_accuracy(Backbone(llama), random_heads(llama, HEADS), [OwnText([1, 2, 3], 2)])
    assert figures.tokens == 0
    assert figures.heads[0].top == {"1": 0.0, "5": 0.0, "10": 0.0}


def test_a_vocabulary_of_fewer_than_ten_tokens_works() -> None:
    from tests.helpers import tiny_model

    model = tiny_model("llama", vocab_size=7)
    figures = head_accuracy(Backbone(model), random_heads(model, 2), [OwnText([1, 2, 3, 4, 5, 6, 0, 1], 1)])
    assert figures.heads[0].top["10"] == 1.0


def test_a_tree_accepts_the_deepest_correct_path() -> None:
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 2], [0, 0, 1]])
    ranks = torch.tensor([[0, 0, 1, 2, 0, 0], [0, 2, 0, 0, 1, 0], [1, 1, 1, 1, 1, 0]])
    assert accepted(tree, ranks.T).tolist() == [3, 2, 1, 0, 1, 2]
    counts = GuessCounts(3, tree)
    taught = torch.ones_like(ranks, dtype=torch.bool)
    taught[2, 5] = False  # the text ends before the last head's label: no chain, but the nearer heads' labels count
    counts.add(ranks, taught)
    assert counts.expected_tau == 1 + (3 + 2 + 1 + 0 + 1) / 5
    assert [head.top["1"] for head in counts.figures()] == pytest.approx([4 / 6, 4 / 6, 0.0], abs=5e-5)
    assert [head.conditional_top1 for head in counts.figures()] == pytest.approx([3 / 5, 1 / 3, 0.0], abs=5e-5)
    counts.reduce(lambda sums: 2 * sums)  # two processes that counted the same
    assert counts.expected_tau == 1 + 7 / 5
