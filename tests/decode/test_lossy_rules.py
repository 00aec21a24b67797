"""The lossy rules of blockwise decoding (Stern et al. 2018, section 5): `topk:K` and `distance:D`, at temperature 0."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decode import generate, steps
from decode.accept import accept_longest
from decode.draft import Draft
from decode.rules import among_best, is_lossy, near_best
from decode.settings import DecodingOptions, Settings
from decode.topology import Topology
from medusa import Tree
from medusa.errors import RequestError
from tests.helpers import VOCAB, left_padded, plain, random_heads, random_ids

NEW = 20
PROMPTS = [random_ids(9, seed=1), [4, 5, 6, 7, 4, 5], random_ids(14, seed=3)]
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def test_tokens_among_the_best() -> None:
    scores = torch.tensor([0.5, 3.0, -torch.inf, 2.0, 1.0])
    assert among_best(scores, 1).tolist() == [False, True, False, False, False]
    assert among_best(scores, 3).tolist() == [False, True, False, True, True]
    assert among_best(scores, 99).tolist() == [True, True, False, True, True], "what a processor forbids stays so"


def test_tokens_near_the_best() -> None:
    scores = torch.tensor([0.5, 3.0, -torch.inf, 2.0, 1.0])
    assert near_best(scores, 0).tolist() == [False, True, False, False, False]
    assert near_best(scores, 2).tolist() == [True, True, False, True, False]


def test_worked_example() -> None:
    """Chain 1 2 3 after the root, with the backbone's ranking of tokens after each node."""
    draft = Draft(torch.tensor([[9, 1, 2, 3]]), Topology.of(Tree.chain(3)))
    orders = [[1, 5, 6], [4, 2, 7], [8, 7, 5, 3], [6, 1, 2]]
    table = torch.full((4, 10), -5.0)
    for node, order in enumerate(orders):
        for place, token in enumerate(order):
            table[node, token] = 3.0 - place / 2

    def ends(passes: Any, room: int | None = None) -> tuple[int, int]:
        limit = None if room is None else torch.tensor([room])
        found = accept_longest(draft, [table[None]], passes, limit)
        return int(found.length), int(found.next_root)

    assert ends(lambda s: among_best(s, 1)) == (2, 4)
    assert ends(lambda s: among_best(s, 2)) == (3, 8)
    assert ends(lambda s: among_best(s, 4)) == (4, 6)
    assert ends(lambda s: among_best(s, 4), room=2) == (3, 8)
    assert ends(lambda s: near_best(s, 1)) == (2, 4)
    assert ends(lambda s: near_best(s, 2)) == (3, 8), "2 is two from 4; 3 is five from 8"


@pytest.mark.parametrize(
    ("rule", "options"),
    [("topk:1", {"repetition_penalty": 1.4}), ("distance:0", {"no_repeat_ngram_size": 3}), ("distance:0", {})],
    ids=str,
)
def test_without_tolerance_it_is_greedy(llama: Any, rule: str, options: dict) -> None:
    for drafter, tree in (("blockwise", None), ("heads", "topk:4,3,2")):
        out = generate(
            llama,
            random_heads(llama),
            **left_padded(PROMPTS),
            drafter=drafter,
            tree=tree,
            acceptance=rule,
            **GREEDY,
            **options,
        )
        width = max(map(len, PROMPTS))
        assert out[:, width:].tolist() == [plain(llama, p, **GREEDY, **options) for p in PROMPTS]


def says(model: Any, text: list[int]) -> torch.Tensor:
    """Logits [V] after a text, by a plain forward."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text])).logits[0, -1]


def followed(model: Any, prompt: list[int], taken: list[Any], passes: Any) -> int:
    """Check every token against plain forwards: a step's last one is the backbone's best, those before pass; how many
    are not what greedy decoding would have written."""
    text, lossy = list(prompt), 0
    text += [int(says(model, text).argmax())]
    assert taken[0].ids[0][0] == text[-1]
    for number, step in enumerate(taken):
        for place, token in enumerate(step.ids[0]):
            if place == 0:
                if number:
                    assert token == int(says(model, text).argmax()), "a root is the most probable token"
                    text.append(token)
                continue
            logits = says(model, text)
            assert bool(passes(logits)[token])
            lossy += token != int(logits.argmax())
            text.append(token)
    return lossy


SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0, "top_p": 0.8}


def typical_by_hand(logits: torch.Tensor) -> torch.Tensor:
    """The typical tokens [V] with `SAMPLED`: above min(0.09, 0.3 exp(-entropy)) of the distribution that is left."""
    p, order = (logits.double() / 0.7).softmax(-1).sort(descending=True)
    left = torch.zeros_like(p)
    left[order] = torch.where(p.cumsum(-1) - p < 0.8, p, 0.0)  # the fewest tokens that hold this share
    left /= left.sum()
    entropy = -sum(x * math.log(x) for x in left.tolist() if x)
    return left > min(0.09, 0.3 * math.exp(-entropy))


@pytest.mark.parametrize(
    ("rule", "options", "passes"),
    [
        ("topk:3", {}, lambda scores: among_best(scores, 3)),
        ("distance:4", {}, lambda scores: near_best(scores, 4)),
        ("typical", SAMPLED, typical_by_hand),
    ],
    ids=["topk", "distance", "typical"],
)
def test_every_token_passes_its_rule_and_some_differ_from_greedy(
    llama: Any, rule: str, options: dict[str, Any], passes: Any
) -> None:
    """Slow and obvious: each token looked up in plain forwards. And the longer steps are longer."""
    heads, lossy, count, exact = random_heads(llama), 0, 0, 0
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        taken = list(steps(llama, heads, ids, drafter="heads", tree="topk:5,2,1", acceptance=rule, **GREEDY | options))
        lossy += followed(llama, prompt, taken, passes)
        count += len(taken)
        exact += len(list(steps(llama, heads, ids, drafter="heads", tree="topk:5,2,1", **GREEDY)))
    assert lossy > 0, "nothing was lost: no power"
    assert count < exact


def test_a_text_does_not_depend_on_the_batch(llama: Any) -> None:
    heads, options = random_heads(llama), GREEDY | {"drafter": "blockwise", "acceptance": "topk:8"}
    alone = [generate(llama, heads, torch.tensor([p]), **options)[0, len(p) :].tolist() for p in PROMPTS]
    together = generate(llama, heads, **left_padded(PROMPTS), **options)
    assert together[:, max(map(len, PROMPTS)) :].tolist() == alone


def test_unsupported_arguments_are_rejected_in_python(llama: Any) -> None:
    heads, ids = random_heads(llama), torch.tensor([PROMPTS[0]])
    with pytest.raises(RequestError, match="acceptance 'topk:2' gives no output_scores or output_logits"):
        generate(llama, heads, ids, acceptance="topk:2", output_scores=True, return_dict_in_generate=True, **GREEDY)


def test_lossy_rules_are_labelled_lossy() -> None:
    assert not any(map(is_lossy, ("greedy", "rejection")))
    assert all(map(is_lossy, ("typical", "typical-sampled", "topk:2", "distance:0")))
    assert DecodingOptions(acceptance="topk:2").rule_for(False).name == "topk:2"
    assert Settings(acceptance="distance:3").to_dict()["acceptance"] == "distance:3"
    with pytest.raises(RequestError, match=r"typical-sampled, topk:K and distance:D: lossy"):
        DecodingOptions(acceptance="hopeful").rule_for(False)
    assert VOCAB > 8, "or topk:8 takes everything"
