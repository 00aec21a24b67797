"""Models with recurrent layers write the text of `model.generate`, and their states are never wrong or lost."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import decode.reader
from decode.bench.losslessness.cases import RULES, passes
from decode.bench.losslessness.experiment import Experiment
from decode.bench.methods import medusa_method, plain_method
from decode.cache import TreeCache
from decode.draft import Draft
from decode.drafters.layouts import DynamicTree
from decode.drafters.trained_heads import TrainedHeads
from decode.layers import switch
from decode.layers.reading import current
from decode.reader import Reader, ReaderFactory
from decode.settings import Settings
from decode.topology import Topology, chain
from decode.tree_check import check_tree_forward
from medusa import RequestError, Tree
from medusa.backbone import Backbone, require_tree_support
from medusa.tree_support import BOTH, CHUNKED, FULL, SLIDING, STATE_FUNCTIONS, STATES, LayerTypes
from tests.helpers import REFUSED as REFUSED_ROWS
from tests.helpers import (
    ScriptedDrafter,
    at_once,
    decode_with,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    shared_model,
    weekly,
)
from tiny_models import MULTIMODAL, RECURRENT, tiny_model

NEW = 9
LENGTHS = (1, 2, 7, 40)
KINDS = ("qwen3_next", "kimi_linear", "mamba2", "lfm2", "mamba", "falcon_h1")  # one for each kind of states
WITH_STATES = [name for name in RECURRENT if name != "granitemoehybrid, attention"]


def prompts_of(*lengths: int) -> list[list[int]]:
    return [random_ids(length, seed) for seed, length in enumerate(lengths)]


def texts_of(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return [plain(model, prompt, max_new_tokens=NEW, **options) for prompt in prompts]


def scripted(model: Any, prompts: list[list[int]], tree: Tree) -> None:
    """Decode a ragged batch with drafts of 0 to all right tokens, at random nodes of the tree."""
    texts, rng = texts_of(model, prompts), random.Random(0)
    drafter = ScriptedDrafter(tree, texts, lambda step: rng.randint(0, tree.max_depth))
    inputs = left_padded(prompts)
    session, taken = decode_with(model, drafter, inputs.pop("input_ids"), max_new_tokens=NEW, do_sample=False, **inputs)
    assert session.sequences.new_ids == texts
    assert len({step.lengths[row] for step in taken for row in step.lengths}) > 1, "all steps were alike: no power"


@pytest.mark.parametrize(
    "name",
    [
        *KINDS,
        "bailing_hybrid",
        "zamba",
        *weekly(*(name for name in RECURRENT if name not in (*KINDS, "bailing_hybrid", "zamba"))),
    ],
)
def test_every_type_writes_the_text_of_generate(name: str) -> None:
    """In a ragged batch with a static tree. Each kind of states: also a dynamic tree, alone, a chain, and plain."""
    model, prompts = shared_model(name), prompts_of(*(LENGTHS if name in KINDS else LENGTHS[1:3]))
    scripted(model, prompts, random_tree(10, seed=1, max_depth=4))
    if name in KINDS:
        settings, heads, expected = Settings(max_new_tokens=NEW), random_heads(model, 3), texts_of(model, prompts)
        dynamic = medusa_method(model, heads, settings, tree=DynamicTree.over_heads(8, 3))
        assert [result.new_ids for result in dynamic(prompts[:2])] == expected[:2]
        scripted(model, prompts[2:3], Tree.chain(3))
        assert [result.new_ids for result in plain_method(model, settings)(prompts)] == expected


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", *weekly("kimi_linear", "mamba", "falcon_h1")])
def test_prompts_longer_than_a_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding of shorter rows, and whole pieces of it, change no state."""
    monkeypatch.setattr(decode.reader, "PIECE_TOKENS", 8)
    monkeypatch.setattr(decode.reader, "MIN_PIECE_ROW", 3)
    model, prompts = shared_model(name), prompts_of(3, 20, 12, 1)
    scripted(model, prompts, Tree.top_k([2, 1]))


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_samples_follow_the_target(name: str) -> None:
    """200,000 tokens after a tree, for each lossless rule, by chi-square tests (`decode.bench.losslessness`)."""
    model = shared_model(name, initializer_range=0.15)
    tree = Tree.from_paths([[0], [1], [4], [0, 0], [0, 2], [1, 0], [0, 0, 0]])
    heads, options = random_heads(model, 3), Settings(temperature=1.0)
    made = Experiment(model, TrainedHeads(heads, tree), random_ids(7, 3), options, torch.Generator().manual_seed(0))
    cases = [made.run(rule, 0, 200_000) for rule in RULES[:2]]
    assert passes(cases)
    assert all(case.second.draws > 500 for case in cases), "hardly any second token was counted: no power"


def reader_of(model: Any, prompts: list[list[int]]) -> Reader:
    """A reader that has read the prompts."""
    reader = ReaderFactory().create(Backbone(model), len(prompts), 64)
    width = max(map(len, prompts))
    ids = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts])
    reader.prefill(ids, list(map(len, prompts)))
    return reader


def states(cache: TreeCache) -> list[Tensor]:
    return [state[: len(cache.lengths)].clone() for state in cache.states]


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    # Rounding errors of float32 grow to 1e-5 in three layers of wide weights; a wrong state differs by 0.1 or more.
    near = [(one - other).abs().max() < 1e-3 * other.abs().max() for one, other in zip(some, others, strict=True)]
    return bool(near) and all(near)


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_states_after_commits_selects_and_joins_equal_those_of_fresh_prompts(name: str) -> None:
    model, tree = shared_model(name), random_tree(6, seed=2, max_depth=3)
    texts = prompts_of(5, 9, 3)
    reader, topology = reader_of(model, texts), Topology.of(tree)
    nodes = [random_ids(tree.num_nodes, 10 + row) for row in range(3)]
    lines = [[n for n in tree.paths[leaf].tolist() if n >= 0] for leaf in (tree.num_nodes - 1, 2, 0)]
    reader.read(Draft(torch.tensor(nodes), topology))
    reader.cache.keep(list(map(len, lines)), lines)
    texts = [text + [ids[n] for n in line] for text, ids, line in zip(texts, nodes, lines, strict=True)]
    assert equal(states(reader.cache), states(reader_of(model, texts).cache))
    reader.cache.select([2, 1])  # the first text has ended, and the last one takes its place
    assert equal(states(reader.cache), states(reader_of(model, [texts[2], texts[1]]).cache))
    joined = prompts_of(4, 11)
    reader.cache.join(reader_of(model, joined).cache)
    assert equal(states(reader.cache), states(reader_of(model, [texts[2], texts[1], *joined]).cache))


@torch.no_grad()
def test_nothing_changes_before_a_commit_and_errors_leave_nothing_behind() -> None:
    model = shared_model("qwen3_next")
    reader = reader_of(model, prompts_of(5, 9))
    before, draft = states(reader.cache), Draft(torch.tensor([random_ids(4)] * 2), chain(4, torch.device("cpu")))
    reader.read(draft)
    assert all(map(torch.equal, before, states(reader.cache)))
    reader.read(draft)
    reader.cache.keep([0, 2])
    assert all(one[0].equal(other[0]) for one, other in zip(before, states(reader.cache), strict=True))

    last = model.model.layers[-1]
    handle = last.register_forward_pre_hook(lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    kept = states(reader.cache)
    with pytest.raises(KeyboardInterrupt):
        reader.read(draft)
    handle.remove()
    assert current() is None
    assert all(map(torch.equal, kept, states(reader.cache)))
    with pytest.raises(RuntimeError, match="cannot go back"):
        reader.cache.cut([3, 3])


@torch.no_grad()
def test_other_threads_and_copies_run_the_stock_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread is inside a forward over a tree, `generate` of another one, and of a copy, writes its own text."""
    model, prompt, found = shared_model("qwen3_next"), random_ids(9), []
    expected = plain(model, prompt, max_new_tokens=NEW)
    reader = reader_of(model, [prompt])
    stock, begun = switch.functions.gated_delta, list[bool]()

    def meanwhile(*args: Any) -> Any:
        def other(_: int) -> None:
            ids = torch.tensor([prompt])
            for each in (model, copy.deepcopy(model)):
                out = each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
                found.append(out[0, len(prompt) :].tolist())

        if not begun:  # once, also if the other thread came here, which would be a fault
            begun.append(True)
            at_once(other)
        return stock(*args)

    monkeypatch.setattr(switch.functions, "gated_delta", meanwhile)
    reader.read(Draft(torch.tensor([random_ids(1)]), chain(1, torch.device("cpu"))))
    assert found
    assert all(text == expected for text in found)


def file_of(cls: type) -> Any:
    return sys.modules[cls.__module__]


def test_functions_are_wrapped_once() -> None:
    model = shared_model("qwen3_next")
    file = file_of(type(model))
    switch.prepare_states(model)
    before = [getattr(file, name) for name in STATE_FUNCTIONS if hasattr(file, name)]
    switch.prepare_states(model)
    assert before == [getattr(file, name) for name in STATE_FUNCTIONS if hasattr(file, name)]
    assert all(function.__wrapped__ not in before for function in before)
    assert set(switch.FUNCTIONS) == set(STATE_FUNCTIONS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("mllama", "qwen3_5", "qwen3_5_moe") else pytest.mark.full)
        for name in MULTIMODAL
    ],
)
def test_models_that_also_read_images_hold_trees_of_text(name: str) -> None:
    """Qwen3.5 is published so; Mllama asks the layers of a cache for their keys."""
    assert check_tree_forward(tiny_model(name)).ok


def test_a_recurrent_draft_model_is_refused() -> None:
    from decode.drafters.model import DraftModel

    with pytest.raises(RequestError, match="draft model that only attends"):
        DraftModel(shared_model("mamba"), Tree.chain(2))


@pytest.mark.full  # it makes the configs and imports the files of all types
def test_every_type_with_states_is_on_a_list() -> None:
    """A new release of transformers with another such type fails here, until the type is tried or refused."""
    attends = {FULL, SLIDING, CHUNKED}
    tried = {name.split(",")[0].removesuffix("_text") for name in (*RECURRENT, *REFUSED_ROWS)}
    choosing = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = AutoConfig.for_model(name)
        except Exception:  # a type whose default config is not valid
            continue
        cls = AutoModelForCausalLM._model_mapping[type(config)]
        types = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
        if types - attends - {*STATES, *BOTH, "moe", "mlp"}:
            choosing.add(name)  # refused by the names of their layers
        elif (
            types - attends
            or getattr(cls, "_is_stateful", False)
            or hasattr(sys.modules[cls.__module__], STATE_FUNCTIONS[0])
        ):
            assert name.removesuffix("_text") in tried, f"{name} keeps states: add it to scripts/architectures.yaml"
    assert choosing, "no type chooses by itself what a token sees"


def test_only_models_with_states_are_said_to_have_them() -> None:
    for name in RECURRENT:
        assert LayerTypes(tiny_model(name).config).has_states == (name in WITH_STATES)
    require_tree_support(tiny_model("granitemoehybrid, attention"))
    assert not LayerTypes(tiny_model("llama").config).has_states


def test_layers_that_keep_nothing_take_no_memory() -> None:
    """Nemotron-H has more feed-forward layers than attention layers."""
    model = shared_model("nemotron_h")
    cache = reader_of(model, prompts_of(5)).cache
    assert sum(map(len, cache.buffers)) == 2 * model.config.layer_types.count(FULL), "keys and values, if it attends"
