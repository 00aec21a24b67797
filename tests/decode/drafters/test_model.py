"""decode/drafters/model.py: every node holds the draft model's prediction, computed with a correct cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decode import generate
from decode.bench.losslessness.cases import RULES, passes, rules_for
from decode.bench.losslessness.experiment import Experiment
from decode.bench.methods import medusa_method, transformers_method
from decode.draft import Draft, Frontier
from decode.drafters.base import DrafterContext
from decode.drafters.layouts import DynamicTree
from decode.drafters.model import DraftModel, DraftModelConfig
from decode.drafters.small_model import require_same_tokenizer
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.session import Session
from decode.settings import Settings
from decode.topology import chain
from medusa import Tree
from medusa.errors import RequestError
from medusa.loading import LoadOptions, load_backbone
from tests.decode.drafters.test_drafters import draft_model
from tests.decode.drafters.test_paths import path_to
from tests.helpers import VOCAB, random_ids, run_steps, tiny_model, weekly

PROMPTS = [random_ids(5, seed=1), random_ids(9, seed=2), random_ids(7, seed=3)]
SHAPES: dict[str, Any] = {
    "chain": Tree.chain(4),
    "tree": Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 1]]),
    "dynamic": DynamicTree.over_heads(9, 3),
}


@torch.no_grad()
def said(model: Any, text: list[int]) -> torch.Tensor:
    """Logits [V] from a plain forward over the whole text."""
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *weekly(*(("llama", shape) for shape in SHAPES)),
        *(("mistral, window", "tree"), ("gemma3_text", "dynamic"), ("llama4_text", "chain"), ("gpt2", "tree")),
    ],
)
def test_nodes_equal_the_draft_models_predictions(family: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every step of a ragged batch in which rows end; a wrong cache would otherwise change only tau."""
    model = tiny_model(family)
    source = DraftModel(draft_model(model, 0.1), SHAPES[shape])
    requests = prepare(model, PROMPTS, max_new_tokens=10, do_sample=False)
    requests[1] = requests[1]._replace(max_new_tokens=5)
    session = Session(model, requests, source.num_nodes)
    drafter = source.start(session)
    propose, checked = drafter.propose, 0

    def watched(frontier: Frontier) -> Draft:
        nonlocal checked
        draft = propose(frontier)
        topology = draft.topology
        for index, row in enumerate(frontier.rows):
            text = session.sequences.prefix(row)[0].tolist()
            ranks: dict[int, list[int]] = {}
            in_order: list[int] = []
            orders: dict[tuple[int, ...], list[int]] = {}
            for node in range(1, topology.num_nodes):
                *before, token = path_to(draft, index, node)
                if (*before,) not in orders:
                    logits = said(source.model, text + before[1:])
                    orders[(*before,)] = logits.argsort(descending=True, stable=True).tolist()
                parent = int(topology.parent[0 if topology.is_shared else index, node])
                in_order.append(orders[(*before,)].index(token))
                ranks.setdefault(parent, []).append(in_order[-1])
                checked += 1
            where, tree = f"row {row}, step at {len(text)}", SHAPES[shape]
            if isinstance(tree, Tree):
                assert in_order == tree.rank[1 : topology.num_nodes].tolist(), where
            else:
                assert all(sorted(found) == list(range(len(found))) for found in ranks.values()), where
        return draft

    monkeypatch.setattr(drafter, "propose", watched)
    steps = run_steps(session, drafter, AcceptanceRule("greedy"))
    lengths = [length for step in steps for length in step.lengths.values()]
    assert max(lengths) > 2, "hardly anything was accepted: no power"
    assert checked > 40


@pytest.mark.parametrize(("widths", "topk"), [("2x2", 5), ("4", 0)])
def test_drawn_drafts_have_the_targets_distribution(llama: Any, widths: str, topk: int) -> None:
    """p / q with the draft model's own q, candidates filtered or not; false alarm below 1e-4."""
    plan = DraftModelConfig("any", widths=widths)
    source = DraftModel(draft_model(llama), plan.tree, topk)
    settings = Settings(temperature=0.6)
    made = Experiment(llama, source, PROMPTS[0], settings, torch.Generator().manual_seed(0))
    cases = [made.run(rule, 0, 100_000) for rule in RULES[:2]]
    assert passes(cases)
    assert all(case.mean_accepted > 0.1 for case in cases), "hardly anything was accepted: no power"


@torch.inference_mode()
def test_sampled_experiments_draw_among_the_best_candidates(llama: Any) -> None:
    source = DraftModel(draft_model(llama), Tree.top_k([2]), topk=5)
    made = Experiment(llama, source, PROMPTS[0], Settings(temperature=2.0), torch.Generator().manual_seed(0))
    context = made.context
    drafter = made.source.start(context.session, drawn=True)
    draft = drafter.draw(context.frontier, context.session.target, made.draws, 2_000)
    assert len(draft.ids[:, 1:].unique()) == 5


def test_a_draft_model_that_stops_early_draws_nothing(llama: Any) -> None:
    source = DraftModel(llama, Tree.chain(3), confidence=0.5)
    assert {rule.draft for rule in rules_for(source)} == {"topk"}


@torch.no_grad()
def test_a_long_text_is_caught_up_without_large_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After steps without drafts, as in a batch with a text beyond the draft model's context."""
    llama, sizes = tiny_model("llama", max_position_embeddings=256), list[int]()
    source = DraftModel(draft_model(llama), Tree.chain(3))
    monkeypatch.setattr(
        "decode.drafters.model.chain", lambda count, device: sizes.append(count) or chain(count, device)
    )
    for count in (3, 40, 150):
        session = Session(llama, prepare(llama, PROMPTS[:1], max_new_tokens=200, do_sample=False), source.num_nodes)
        drafter, frontier = source.start(session), Frontier(*session.prefill(), [0])
        session.sequences.extend(0, frontier.root.tolist())
        drafter.propose(frontier)
        session.sequences.extend(0, random_ids(count))
        draft = drafter.propose(frontier._replace(root=torch.tensor([random_ids(count)[-1]])))
        expected = said(source.model, session.sequences.tail(0, 0)).argmax()
        assert draft.ids[0, 1] == expected
    assert max(sizes) < 50


def test_a_drawn_sample_does_not_depend_on_the_batch(llama: Any) -> None:
    source = DraftModel(draft_model(llama), Tree.top_k([2, 2, 1]))
    method = medusa_method(llama, None, Settings(max_new_tokens=10, temperature=0.7, draft="sample"), drafter=source)
    together = method(PROMPTS, seeds=[1, 2, 3])
    assert max(length for result in together for length in result.uncut_lengths) > 2, "no power"
    for prompt, seed, result in zip(PROMPTS, [1, 2, 3], together, strict=True):
        assert method([prompt], seeds=[seed])[0].new_ids == result.new_ids


def test_ids_of_transformers_assisted_generation() -> None:
    """On the embedded backbone and its draft model."""
    loaded = load_backbone("demo", LoadOptions("float32"))
    plan, settings = DraftModelConfig("demo"), Settings(max_new_tokens=20)
    source = plan.factory(DrafterContext(loaded.model, tokenizer=loaded.tokenizer))
    assert isinstance(source, DraftModel)
    prompts = [loaded.tokenizer("Once upon a time")["input_ids"]]
    (theirs,) = transformers_method(loaded.model, settings, assistant_model=source.model)(prompts)
    (ours,) = medusa_method(loaded.model, None, settings, drafter=source)(prompts)
    assert ours.new_ids == theirs.new_ids
    assert max(ours.uncut_lengths) == 5, "never all four tokens: no power"


def test_a_text_beyond_the_draft_models_context(llama: Any) -> None:
    """Beyond its context the draft model drafts nothing, and decoding continues."""
    config = LlamaConfig(**llama.config.to_dict() | {"max_position_embeddings": 20})
    draft = LlamaForCausalLM(config).eval()
    draft.load_state_dict(llama.state_dict())
    source = DraftModel(draft, Tree.chain(3))
    for prompt in (PROMPTS[0], random_ids(25)):
        (result,) = medusa_method(llama, None, Settings(max_new_tokens=24), drafter=source)([prompt])
        (expected,) = transformers_method(llama, Settings(max_new_tokens=24))([prompt])
        assert result.new_ids == expected.new_ids


def test_another_shape_keeps_the_options(llama: Any) -> None:
    changed = DraftModel(llama, Tree.chain(3), topk=5, confidence=0.5).reshaped(lambda tree: tree.clip(1))
    assert (changed.tree.max_depth, changed.topk, changed.confidence) == (1, 5, 0.5)


def test_unsupported_requests_are_rejected(llama: Any, tokenizer: Any, tmp_path: Any) -> None:
    tiny_model("llama", vocab_size=VOCAB + 1).save_pretrained(tmp_path / "other")
    ids = torch.tensor([PROMPTS[0]])
    with pytest.raises(RequestError, match=f"other has {VOCAB + 1} tokens and the backbone {VOCAB}"):
        generate(llama, inputs=ids, drafter=f"model:{tmp_path / 'other'}", max_new_tokens=2)
    with pytest.raises(RequestError, match="no backbone at "):
        generate(llama, inputs=ids, drafter=f"model:{tmp_path / 'absent'}", max_new_tokens=2)
    source = DraftModel(llama, SHAPES["dynamic"])
    with pytest.raises(RequestError, match="leave nodes and confidence out"):
        generate(llama, inputs=ids, drafter=source, draft="sample", do_sample=True, max_new_tokens=2)
    source = DraftModel(llama, Tree.chain(3), confidence=0.5)
    with pytest.raises(RequestError, match=r"use draft topk \(a draft model: leave confidence out"):
        generate(llama, inputs=ids, drafter=source, draft="sample", do_sample=True, max_new_tokens=2)
    with pytest.raises(RequestError, match="the tree takes guess"):
        DraftModel(llama, Tree.top_k([VOCAB + 1]))
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer)
    other.add_tokens(["zebra"])
    with pytest.raises(RequestError, match="draft model x has another tokenizer: 'zebra' is nothing in y and"):
        require_same_tokenizer("x", other, tokenizer, "y")
