"""Block drafters in trees: drafts follow what the heads say on each path after the text, computed path by path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decode import generate
from decode.bench.calibration.calibrate import calibrate
from decode.draft import Frontier
from decode.drafters import levelwise
from decode.drafters.layouts import DynamicTree, Layout, with_shortlist
from decode.drafters.trained_heads import TrainedHeads, heads_drafter
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import Settings
from decode.step import State
from medusa import MedusaHeads, Tree
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.dflash import DflashHeads
from medusa.vocabulary import lm_head_for, over_all
from tests.decode.drafters.test_paths import best_paths, path_to, require_drawn
from tests.helpers import (
    BLOCK_FORM,
    BLOCK_FORMS,
    VOCAB,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    run_steps,
    shared_model,
    times_of_few_steps,
)

K, PROMPTS = 3, [random_ids(length, seed=length) for length in (9, 4)]
FORMS = BLOCK_FORMS | {
    "vocabulary": BLOCK_FORM | {"edges": "markov", "rank": 6, "vocabulary": 40},
    "own": BLOCK_FORM | {"edges": "pairwise", "rank": 6, "lm_head": "one", "embeddings": "own", "mask_token": None},
}


def heads_of(name: str, model: Any) -> MedusaHeads:
    heads = random_heads(model, K, **FORMS[name]).to(model.dtype)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(0.6)  # confidences below e^-50 count as equal
        assert isinstance(heads, DflashHeads)
        heads.hidden_norm.weight.add_(1)
    if heads.vocabulary is not None:
        heads.vocabulary = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[: len(heads.vocabulary)]
    return heads


def start_of(model: Any, heads: MedusaHeads, prompts: list[list[int]] = PROMPTS) -> Frontier:
    """What a drafter reads after the prompts, which have different lengths."""
    session = Session(model, prepare(model, prompts, max_new_tokens=4, do_sample=False), slack=40, heads=heads)
    return State(session.reader, session.heads_cache, *session.prefill()).frontier()


@torch.no_grad()
def logits_after(model: Any, heads: MedusaHeads, prompt: list[int], path: list[int]) -> Tensor:
    """The logits [VOCAB] of the head after the tokens of `path`, root first, from whole texts without a cache."""
    backbone, ids = Backbone(model, heads.config.feature_layers), torch.tensor([prompt + path])
    hidden = backbone.hidden_states(ids[:, : len(prompt)], use_cache=False)
    inputs = heads.inputs(hidden, ids, backbone.embed, place=torch.tensor([len(prompt) - 1]))
    return over_all(heads, heads(inputs, lm_head_for(heads, backbone)), VOCAB)[len(path) - 1, 0]


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_nodes_of_a_static_tree(name: str) -> None:
    model = shared_model(dtype=torch.float64)
    heads, tree = heads_of(name, model), random_tree(14, 1, max_depth=K)
    start = start_of(model, heads)
    draft = heads_drafter(heads, Backbone(model, [1, 0]), with_shortlist(tree, VOCAB)).propose(start)
    for row, prompt in enumerate(PROMPTS):
        orders: dict[tuple[int, ...], Tensor] = {}
        for node in range(1, tree.num_nodes):
            *path, token = path_to(draft, row, node)
            if (*path,) not in orders:
                said = logits_after(model, heads, prompt, path)
                orders[(*path,)] = said.argsort(descending=True, stable=True)
            assert token == int(orders[(*path,)][tree.rank[node]])


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_a_dynamic_tree_holds_the_most_probable_paths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levelwise, "width_of", lambda tree: tree.num_nodes)
    model, temperatures = shared_model(dtype=torch.float64), (0.7, 1.0, 1.5)
    heads = heads_of(name, model)
    tree = with_shortlist(DynamicTree.over_heads(9, K, temperatures), VOCAB)
    draft = heads_drafter(heads, Backbone(model, [1, 0]), tree).propose(start_of(model, heads))
    for row, prompt in enumerate(PROMPTS):

        def tempered(path: list[int], prompt: list[int] = prompt) -> Tensor:
            said = logits_after(model, heads, prompt, path) / temperatures[len(path) - 1]
            # Candidates hold the same probability after every token; here they are all tokens.
            return said.log_softmax(-1)

        found = {tuple(path_to(draft, row, node)) for node in range(9)}
        assert found == best_paths(tempered, int(draft.ids[row, 0]), 9, K)


@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_drawn_drafts_follow_the_heads(name: str) -> None:
    model = shared_model(dtype=torch.float64)
    heads, tree = heads_of(name, model), with_shortlist(Tree.top_k([2, 2, 1]), VOCAB)
    one = start_of(model, heads, PROMPTS[:1])

    def make(target: Any) -> Any:
        return heads_drafter(heads, Backbone(model, [1, 0]), tree, target)

    def q_after(path: list[int]) -> Tensor:
        return (logits_after(model, heads, PROMPTS[0], path) / 0.8).softmax(-1).float()

    require_drawn(make, one, True, q_after, temperature=0.8, top_k=0)


@pytest.mark.parametrize("name", FORMS)
def test_texts_are_those_of_generate_in_every_tree_and_batch(name: str) -> None:
    model = shared_model()
    heads, batch = heads_of(name, model), left_padded(PROMPTS)
    wanted = [plain(model, prompt, max_new_tokens=8, eos_token_id=None) for prompt in PROMPTS]
    layouts: list[Layout | str] = ["topk:3,2,1", "dynamic:9", "chain"]
    ways: list[dict[str, Any]] = [{"tree": tree} for tree in layouts] + [{"drafter": "mix:heads+ngram"}]
    for way in ways if name in BLOCK_FORMS else ways[:2]:
        out = generate(model, heads, **batch, **way, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert isinstance(out, Tensor)
        assert out[:, 9:].tolist() == wanted


@pytest.mark.parametrize("name", ["dflash, markov", "dflash, pairwise"])
def test_rows_of_a_batch_take_the_steps_that_they_take_alone(name: str) -> None:
    model = shared_model()
    heads = heads_of(name, model)
    factory = TrainedHeads(heads, Tree.top_k([12, 4, 2]))
    found = []
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS[1:]):
        requests = prepare(model, prompts, max_new_tokens=12, do_sample=False, eos_token_id=None)
        session = Session(model, requests, slack=140, heads=heads)
        steps = run_steps(session, factory.start(session), AcceptanceRule("greedy"))
        found += [[step.lengths[row] for step in steps if row in step.lengths] for row in range(len(prompts))]
    assert found[:2] == found[2:]
    assert max(map(max, found)) > 1, "no guess is right: no power"


def test_a_backbone_that_scales_its_embeddings_is_refused() -> None:
    model = shared_model("gemma3_text")
    heads = random_heads(model, K, **BLOCK_FORM)
    with pytest.raises(RequestError, match="Gemma3ForCausalLM scales its embeddings"):
        heads_drafter(heads, Backbone(model, [1, 0]), Tree.chain(K))


def test_calibration_finds_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.bench.calibration.calibrate.MIN_STEPS", 1)
    monkeypatch.setattr("decode.bench.calibration.calibrate.time_steps", times_of_few_steps)
    monkeypatch.setattr("decode.bench.calibration.variants.SHORTLISTS", (16,))
    model = shared_model()
    texts = [(prompt, plain(model, prompt, max_new_tokens=16, eos_token_id=None)) for prompt in PROMPTS]
    found = calibrate(model, heads_of("dflash, markov", model), texts, Settings(), sizes=[2], rounds=1)
    assert {point.nodes for point in found.points} >= {2}
