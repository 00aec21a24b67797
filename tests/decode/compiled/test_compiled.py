"""The compiled step: equal shapes in every step, and the texts of the eager loop.

`as_written` runs a region's step without compiling it, which shows that fixed shapes decide as the eager loop does;
`traced` lets torch.compile capture it whole (`fullgraph` raises at a graph break) without making machine code, which
takes most of the time. Both are fixtures of conftest.py. Tests that make machine code run with `--full`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import generate
from decode.compiled import region
from decode.compiled.region import Regions
from decode.compiled.stepper import _has_compiler
from decode.drafters.layouts import DynamicTree, resolve_tree
from decode.drafters.trained_heads import TrainedHeads
from decode.generation import steps
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.sequences import Request
from decode.texts import Decoding, stepper_for
from medusa import Tree
from medusa.errors import RequestError
from tests.helpers import (
    FORMS,
    RESIDUAL,
    left_padded,
    plain,
    random_heads,
    random_ids,
    random_tree,
    run_as_written,
    shared_model,
    tiny_model,
    weekly,
)

ANY_TOKEN: dict[str, Any] = {"do_sample": True, "temperature": 1e3, "top_k": 0}  # all are about as probable
Step = Callable[[], Tensor]


def texts(model: Any, heads: Any, prompts: list[list[int]], tree: Any, **kwargs: Any) -> list[list[int]]:
    inputs = left_padded(prompts)
    out = generate(model, heads, **inputs, tree=tree, compile=True, **kwargs)
    assert isinstance(out, Tensor)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


TREES: dict[str, Any] = {
    "static": random_tree(12, max_depth=3),
    "dynamic": "dynamic:30",
    "chain": Tree.chain(3),
    "root": Tree.chain(0),
    "with temperatures": DynamicTree.over_heads(30, 3, (0.7, 1.1, 1.3)),
    # Every level is traced by itself, and the second one does what later ones do.
    "shallow": Tree.top_k([3, 2]),
    "shallow, grown": DynamicTree.over_heads(12, 2, (0.7, 1.1)),
}
READ = [(family, "static") for family in ("llama", "llama4_text", "gpt2", "deepseek_v3", "gemma4_text")]
READ += [("llama", "dynamic"), ("llama", "root"), ("gemma2", "with temperatures")]
READ += weekly(
    ("llama", "chain"), *((family, "static") for family in ("mistral", "gemma3_text", "gemma2", "gemma3n_text"))
)


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(("family", "tree"), READ)
def test_greedy_texts_equal_generate(family: str, tree: str) -> None:
    """In Gemma 3n and 4, layers read the keys of other layers."""
    model = shared_model(family)
    Regions.of(model).clear()
    heads = random_heads(model)
    for seed in range(1 + (family == "llama")):  # the second time in the first one's region
        prompts = [random_ids(length, seed=length + seed) for length in (3, 11)]
        found = texts(model, heads, prompts, TREES[tree], max_new_tokens=10, do_sample=False, eos_token_id=None)
        assert found == [plain(model, prompt, max_new_tokens=10, eos_token_id=None) for prompt in prompts]
    assert len(Regions.of(model)) == 1


@pytest.mark.usefixtures("as_written")
def test_double_precision() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    prompt = random_ids(5)
    found = texts(model, random_heads(model), [prompt], TREES["chain"], max_new_tokens=12, do_sample=False)
    assert found == [plain(model, prompt, max_new_tokens=12)]


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    ("kind", "tree", "prefix_layers"),
    [
        *((form, "static", 0) for form in FORMS),
        *((form, "dynamic", 0) for form in ("medusa", "markov", "eagle", "dflash, pairwise")),
        *weekly(*((form, "dynamic", 0) for form in ("recurrent", "mtp", "dflash"))),
        ("recurrent", "static", 1),
        *weekly(*((kind, "static", 1) for kind in RESIDUAL if kind != "recurrent")),
    ],
)
def test_all_kinds_of_heads_take_the_steps_of_the_eager_loop(
    llama: Any, kind: str, prefix_layers: int, tree: str, monkeypatch: pytest.MonkeyPatch, short_windows: None
) -> None:
    """Drafts are compared, too, which checks the heads' own caches; across capacities, with rows that end early."""
    # With seed 0, a static tree of these heads has no right guess.
    seed = int((kind, prefix_layers) in {("cascade", 0), ("eagle, window", 0), ("markov", 1)})
    heads = random_heads(llama, seed=seed, **FORMS[kind], prefix_layers=prefix_layers)
    prompts = [random_ids(length, seed=length) for length in (5, 2, 9)]
    stop = plain(llama, prompts[1], max_new_tokens=14, eos_token_id=None)[7]
    requests = prepare(llama, prompts, max_new_tokens=14, do_sample=False, eos_token_id=stop)
    factory = TrainedHeads(heads, resolve_tree(TREES[tree], heads))
    eager, fixed = (
        [
            (step.ids, step.lengths)
            for step in Decoding(stepper_for(llama, factory, requests, AcceptanceRule("greedy"), compile=c))
        ]
        for c in (False, True)
    )
    assert eager == fixed
    assert max(length for _, lengths in eager for length in lengths.values()) > 1


@pytest.mark.usefixtures("as_written")
def test_a_kept_region_follows_changes_of_markov_heads(llama: Any) -> None:
    """A region keeps the drafter, which must read the weights again."""
    heads = random_heads(llama, seed=1, **FORMS["markov"])
    requests = prepare(llama, [random_ids(5)], max_new_tokens=12, eos_token_id=None, **ANY_TOKEN)
    drafts = []
    for _ in range(2):
        fixed, eager = (all_accepted(llama, heads, requests, compile) for compile in (True, False))
        assert eager == fixed
        drafts.append(fixed)
        with torch.no_grad():
            heads.token.mul_(-1)
            heads.root.mul_(-1)
    assert drafts[0] != drafts[1], "the change has an effect"


def replace_data(states: Iterable[Tensor]) -> None:
    for state in states:  # the same parameters with other memory
        state.data = torch.randn_like(state)


@pytest.mark.usefixtures("traced")
def test_a_kept_region_follows_changes_of_weights() -> None:
    model, prompt = tiny_model("llama", num_hidden_layers=1), random_ids(5)
    heads, options = random_heads(model), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    rotary, found = model.model.rotary_emb, []
    for change in (
        lambda: None,
        lambda: model.lm_head.weight.mul_(-1),
        lambda: rotary.register_buffer("inv_freq", 3 - rotary.inv_freq),  # neither a setting nor a parameter
        lambda: replace_data([*model.parameters(), *heads.parameters()]),
    ):
        with torch.no_grad():
            change()
        found += texts(model, heads, [prompt], Tree.chain(1), **options)
        assert found[-1] == plain(model, prompt, **options)
    assert len(set(map(tuple, found))) == 4
    assert len(Regions.of(model)) == 1


VARIED = "eagle-3, variants"
MACHINE: dict[str, tuple[int, dict[str, Any]]] = {
    # Heads and settings for machine code: small, as each kernel costs g++ a second. The second level of an eagle layer
    # does what later ones do.
    "recurrent": (3, FORMS["recurrent"] | {"block": "mlp", "num_layers": 2, "expansion": 4}),
    VARIED: (2, FORMS[VARIED] | {"feature_layers": [0, 1], "layer": FORMS[VARIED]["layer"] | {"layers": 1}}),
    "dflash, markov": (2, FORMS["dflash, markov"]),
}


@pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler")
@pytest.mark.full
@pytest.mark.parametrize("kind", MACHINE)
def test_compiled_drafts_equal_eager_drafts(kind: str) -> None:
    """A rule that accepts everything shows the drafts. With buffers written over, machine code of a chain spoiled the
    recurrent heads' state from the third token on, and greedy texts were right all the same. A longer text compiles
    nothing."""
    depth, settings = MACHINE[kind]
    model = tiny_model("llama", num_hidden_layers=1)
    heads, graphs = random_heads(model, depth, **settings), torch._dynamo.utils.counters["stats"]
    for limit in (12, 24):
        before = graphs["unique_graphs"]
        requests = prepare(model, [random_ids(4)], max_new_tokens=limit, eos_token_id=None, **ANY_TOKEN)
        eager, machine = (all_accepted(model, heads, requests, compile) for compile in (False, True))
        assert [lengths for _, lengths in eager] == [{0: depth + 1}] * (limit // (depth + 1))
        assert machine == eager
        assert graphs["unique_graphs"] - before == (limit == 12)
    assert len(Regions.of(model)) == 1


@pytest.mark.usefixtures("as_written")
def test_each_step_draws_its_own_random_numbers(llama: Any) -> None:
    """All tokens are about as probable: one number for all steps would give one token again and again."""
    [text] = texts(
        llama, random_heads(llama), [random_ids(5)], TREES["root"], max_new_tokens=12, seeds=[1], **ANY_TOKEN
    )
    assert len(set(text)) > 6, "a chance below 1e-4, for any seed"


@pytest.mark.usefixtures("as_written")
def test_a_text_outgrows_its_cache(llama: Any, monkeypatch: pytest.MonkeyPatch, short_windows: None) -> None:
    Regions.of(llama).clear()
    prompts = [random_ids(9), random_ids(5)]
    found = texts(llama, random_heads(llama), prompts, "dynamic:6", max_new_tokens=70, do_sample=False)
    assert found == [plain(llama, prompt, max_new_tokens=70) for prompt in prompts]
    [(_, grown)] = Regions.of(llama)
    assert 9 + 70 <= grown.caches[0].capacity < 2 * (9 + 70)


def all_accepted(model: Any, heads: Any, requests: list[Request], compile: bool) -> list[tuple[Any, Any]]:
    """The steps with a chain of guesses and a rule that accepts them all, which shows the drafts."""
    factory, rule = TrainedHeads(heads, Tree.chain(heads.config.num_heads)), AcceptanceRule("typical", 1e-9, 1e-9)
    return [(step.ids, step.lengths) for step in Decoding(stepper_for(model, factory, requests, rule, compile=compile))]


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(("kind", "prefix_layers"), [("medusa", 0), ("medusa", 1), ("eagle", 0)])
def test_a_row_that_has_ended_becomes_an_empty_one(
    llama: Any, kind: str, prefix_layers: int, monkeypatch: pytest.MonkeyPatch, short_windows: None
) -> None:
    """It ends after two steps, where another draft would not fit in its cache. The other row takes its place."""
    Regions.of(llama).clear()
    heads = random_heads(llama, 11, kind=kind, prefix_layers=prefix_layers)
    requests = prepare(llama, [random_ids(20), random_ids(2)], max_new_tokens=40, eos_token_id=None, **ANY_TOKEN)
    requests[0] = requests[0]._replace(max_new_tokens=24)
    eager, fixed = (all_accepted(llama, heads, requests, compile) for compile in (False, True))
    assert [lengths for _, lengths in eager] == [{0: 12, 1: 12}] * 2 + [{1: 12}] * 2
    assert fixed == eager
    [(_, kept)] = Regions.of(llama)
    assert [one.filled.tolist() for one in kept.caches] == [[0, 0]] * len(kept.caches)


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("family", ["llama", "gpt2"])  # gpt2 has no embedding for a position beyond the end
def test_the_end_of_the_context(family: str) -> None:
    model, prompt = tiny_model(family, max_position_embeddings=32), random_ids(10)
    heads = random_heads(model)
    found = texts(model, heads, [prompt], TREES["static"], max_new_tokens=22, do_sample=False)
    assert found == [plain(model, prompt, max_new_tokens=22)]
    requests = prepare(model, [prompt], max_new_tokens=22, eos_token_id=None, **ANY_TOKEN)
    eager, fixed = (all_accepted(model, heads, requests, compile) for compile in (False, True))
    assert [lengths for _, lengths in eager] == [{0: 4}] * 5 + [{0: 2}], "two tokens are left"
    assert fixed == eager


@pytest.mark.usefixtures("as_written")
def test_typical_acceptance_equals_the_eager_rule(llama: Any) -> None:
    heads = random_heads(llama)
    inputs = left_padded([random_ids(7), random_ids(4)])
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.7, "acceptance": "typical"}
    both = [generate(llama, heads, **inputs, tree=TREES["static"], **options, compile=c) for c in (False, True)]
    assert torch.equal(both[0], both[1])  # type: ignore[arg-type]
    greedy = generate(llama, heads, **inputs, tree=TREES["static"], max_new_tokens=40, do_sample=False)
    assert not torch.equal(both[0], greedy)  # type: ignore[arg-type]  # or there was nothing to accept


RULES: dict[str, dict[str, Any]] = {
    "typical": {"do_sample": True, "temperature": 0.8, "acceptance": "typical"},
    "typical-sampled": {"do_sample": True, "top_k": 12, "top_p": 0.9, "acceptance": "typical-sampled"},
}


# The rule reads the draft, whatever drafted it: each test of tokens and each form of tree is met once, here or
# by `test_a_longer_text_compiles_nothing`. Machine code is made of `MACHINE`.
TRACED = [
    ("typical-sampled", "with temperatures", "medusa"),
    *weekly(("typical", "shallow", "mtp")),
]


@pytest.mark.parametrize(("rule", "tree", "kind"), TRACED)
def test_no_graph_break(rule: str, tree: str, kind: str, traced: list[tuple[int, ...]]) -> None:
    """With the same random numbers the captured step also writes the text of the uncompiled step.

    Graphs hold addresses. An input elsewhere would be copied in every step, or missed by our own CUDA graphs."""
    model = tiny_model("llama", num_hidden_layers=1)
    heads = random_heads(model, **FORMS[kind], **({"vocabulary": 40} if kind == "medusa" else {}))
    inputs = left_padded([random_ids(7), random_ids(4)])
    options = RULES[rule] | {"seeds": [1, 2]}
    captured = generate(model, heads, **inputs, tree=TREES[tree], max_new_tokens=12, compile=True, **options)
    assert len(traced) > 3
    assert len(set(traced)) == 1, "every input of a step stays where it is"
    Regions.of(model).clear()
    with pytest.MonkeyPatch.context() as patch:
        run_as_written(patch)
        written = generate(model, heads, **inputs, tree=TREES[tree], max_new_tokens=12, compile=True, **options)
    assert torch.equal(captured, written)  # type: ignore[arg-type]


@pytest.mark.usefixtures("as_written")
def test_sessions_take_turns() -> None:
    """Two texts at once on one model have two regions, and both regions are kept."""
    model = tiny_model("llama")
    heads, prompts = random_heads(model), [random_ids(6), random_ids(9, seed=1)]
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    for _ in range(2):
        written: list[list[int]] = [[], []]
        running = [
            steps(model, heads, torch.tensor([p]), tree=TREES["chain"], compile=True, **options) for p in prompts
        ]
        for both in zip_longest(*running):
            for text, step in zip(written, both, strict=True):
                text += [] if step is None else step.ids[0]
        assert written == [plain(model, prompt, **options) for prompt in prompts]
        assert len(Regions.of(model)) == 2
    unfinished = steps(model, heads, torch.tensor([prompts[0]]), tree=TREES["chain"], compile=True, **options)
    next(unfinished)
    assert len(Regions.of(model)) == 1
    unfinished.close()  # type: ignore[attr-defined]
    assert len(Regions.of(model)) == 2


def untie(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a hook": lambda model, heads: model.model.norm.register_forward_hook(lambda module, args, out: -out),
    "a setting of a module": lambda model, heads: setattr(model.model.norm, "variance_epsilon", 0.5),
    "an adapter that is off": lambda model, heads: setattr(model.model.layers[0], "_disable_adapters", True),
    "an adapter that is on": lambda model, heads: setattr(model.model.layers[0], "_active_adapter", ["a"]),
    "another forward": lambda model, heads: setattr(model.model.norm, "forward", lambda x: x),
    "tied weights": lambda model, heads: untie(model),
    "training": lambda model, heads: model.model.layers[0].train(),
    "the heads' training": lambda model, heads: heads.train(),
    "the heads' precision": lambda model, heads: heads.double(),
    "attention": lambda model, heads: model.set_attn_implementation("eager"),
}


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("change", [*CHANGES, "autocast"])
def test_model_changes_are_checked_once_a_session(change: str) -> None:
    model = tiny_model("llama")
    heads, options = random_heads(model), {"max_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        texts(model, heads, [random_ids(4)], TREES["chain"], **options)
        assert len(Regions.of(model)) == 1
    if change in CHANGES:
        CHANGES[change](model, heads)
    with torch.autocast("cpu", torch.bfloat16) if change == "autocast" else nullcontext():
        texts(model, heads, [random_ids(4)], TREES["chain"], **options)
    assert len(Regions.of(model)) == 2


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    ("family", "name", "value"), [("mistral", "sliding_window", 4), ("llama4_text", "attention_chunk_size", 3)]
)
def test_a_changed_config_is_noticed_by_its_value(family: str, name: str, value: int) -> None:
    """A region holds masks for one window; a config that is changed back finds the first region again."""
    model, prompt = tiny_model(family, **{name: 40}), random_ids(12)
    heads, options, found = random_heads(model), {"max_new_tokens": 12, "do_sample": False}, []
    for number in (40, value, 40):
        setattr(model.config, name, number)
        found += texts(model, heads, [prompt], TREES["chain"], **options)
        assert found[-1] == plain(model, prompt, **options)
    assert found[0] == found[2] != found[1]
    assert len(Regions.of(model)) == 2


@pytest.mark.usefixtures("as_written")
def test_lists_and_parts_of_a_config_count_by_value() -> None:
    model, prompt = tiny_model("gemma3"), random_ids(12)
    heads, options, config = random_heads(model), {"max_new_tokens": 8, "do_sample": False}, model.config.text_config
    for change, regions in (
        (lambda: None, 1),
        (lambda: setattr(config, "layer_types", list(config.layer_types)), 1),  # an equal list
        (lambda: config.layer_types.reverse(), 2),
        (lambda: config.rope_parameters["full_attention"].update(rope_theta=500.0), 3),
    ):
        change()
        assert texts(model, heads, [prompt], TREES["chain"], **options) == [plain(model, prompt, **options)]
        assert len(Regions.of(model)) == regions


@pytest.mark.usefixtures("as_written")
def test_nothing_of_an_earlier_text_remains(llama: Any, monkeypatch: pytest.MonkeyPatch, short_windows: None) -> None:
    """A NaN left in the buffers would reach the next text even when masked: 0 x NaN."""
    Regions.of(llama).clear()
    heads, options = random_heads(llama), {"max_new_tokens": 30, "do_sample": False}
    for length in (40, 5):
        found = texts(llama, heads, [random_ids(length)], TREES["chain"], **options)
        assert found == [plain(llama, random_ids(length), **options)]
        [(_, kept)] = Regions.of(llama)
        with torch.inference_mode():
            for buffer in kept.caches[0].buffers:
                buffer.fill_(torch.nan)


@pytest.mark.usefixtures("traced")
def test_a_model_that_cannot_be_captured_is_refused_in_one_line() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    model.model.embed_tokens.register_forward_hook(lambda part, given, found: found if found.sum() > 0 else None)
    with pytest.raises(RequestError, match=r"^compile is not possible.* LlamaForCausalLM \(.*\); leave it out$"):
        texts(model, random_heads(model), [random_ids(4)], TREES["chain"], max_new_tokens=4, do_sample=False)
    assert not Regions.of(model)


@pytest.mark.usefixtures("as_written")
def test_regions_are_freed_with_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region, "KEPT", 3)
    model = tiny_model("llama")
    heads, prompt = random_heads(model), [random_ids(4)]
    for nodes in range(2, 7):
        texts(model, heads, prompt, f"dynamic:{nodes}", max_new_tokens=3, do_sample=False)
    assert len(Regions.of(model)) == 3
    assert not Regions.of(copy.deepcopy(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("as_written")
def test_caches_of_kept_regions_take_limited_memory() -> None:
    """The last used caches stay. A region without caches gets new ones, and writes the same text."""
    model = tiny_model("llama")
    heads, prompt, kept = random_heads(model), random_ids(4), Regions.of(model)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected, seen = plain(model, prompt, **options), {}
    for nodes in (2, 3, 4):
        assert texts(model, heads, [prompt], f"dynamic:{nodes}", **options) == [expected]
        seen[nodes] = kept[-1][1]
    of_one = seen[2].num_bytes
    assert of_one == 2 * model.config.num_hidden_layers * (256 + 256) * 2 * 8 * 4, "keys and values, float32"
    kept.max_bytes = 2 * of_one
    for nodes, filled in ((3, [3, 4]), (2, [2, 3]), (4, [2, 4])):
        assert texts(model, heads, [prompt], f"dynamic:{nodes}", **options) == [expected]
        assert [number for number, one in seen.items() if one.num_bytes] == filled
        assert sum(one.num_bytes for _, one in kept) <= kept.max_bytes
    assert [one for _, one in kept] == [seen[3], seen[2], seen[4]], "none was made again"


@pytest.mark.full
@pytest.mark.usefixtures("traced")
def test_a_longer_text_compiles_nothing(monkeypatch: pytest.MonkeyPatch, short_windows: None) -> None:
    """Windows and caches grow while the text is written, from one block on, and a longer prompt follows."""
    model = tiny_model("llama", num_hidden_layers=1, max_position_embeddings=256)
    heads = random_heads(model, **FORMS["eagle, window"], prefix_layers=1)
    graphs, before = torch._dynamo.utils.counters["stats"], 0
    for length, limit in ((2, 2), (5, 16), (80, 30), (20, 8)):
        prompts = [random_ids(length), random_ids(length // 2, seed=1)]
        options: dict[str, Any] = {"max_new_tokens": limit, "do_sample": False, "eos_token_id": None}
        before = graphs["unique_graphs"] if limit == 16 else before
        found = texts(model, heads, prompts, TREES["shallow, grown"], **options)
        assert found == [plain(model, prompt, **options) for prompt in prompts]
    assert graphs["unique_graphs"] == before
    [(_, kept)] = Regions.of(model)
    assert kept.caches[0].capacity > 100 > kept.caches[0].width, "the last text reads only its own slots"
    assert len({cache.width for cache in kept.caches}) == 1, "a graph is recorded for one window"


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("llama", {"no_repeat_ngram_size": 3, "repetition_penalty": 1.3}, "NoRepeatNGram"),
        ("llama", {"do_sample": True, "eta_cutoff": 0.01}, "use epsilon_cutoff"),
        ("llama", {"do_sample": True, "draft": "sample"}, "use draft topk"),
        ("llama", {"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ("phi3, longrope", {"max_new_tokens": 29}, "more than 32 tokens differently, and a prompt of 4 tokens and 29"),
        ("phimoe, longrope", {}, "longrope RoPE"),
    ],
)
def test_unsupported_options_are_rejected(family: str, options: dict[str, Any], said: str) -> None:
    model = tiny_model(family)
    with pytest.raises(RequestError, match=said):
        texts(
            model,
            random_heads(model),
            [random_ids(4)],
            TREES["chain"],
            **{"do_sample": False, "max_new_tokens": 4} | options,
        )


def test_longrope_up_to_its_boundary(request: pytest.FixtureRequest, full: bool) -> None:
    """Also after a longer text, which was decoded eagerly. Of the last drafts, nodes lie beyond the boundary."""
    request.getfixturevalue("traced" if full else "as_written")
    model, prompt, limits = tiny_model("phi3, longrope"), random_ids(5), {"do_sample": False, "eos_token_id": None}
    heads, tree = random_heads(model), Tree.chain(2)
    for _ in range(2):
        expected = plain(model, prompt, max_new_tokens=27, eos_token_id=None)
        assert texts(model, heads, [prompt], tree, max_new_tokens=27, **limits) == [expected]
        long = generate(model, heads, torch.tensor([random_ids(20)]), tree=tree, max_new_tokens=20, **limits)
        assert long.shape[1] == 40
    assert len(Regions.of(model)) == 1


def test_hidden_states_cannot_be_kept(llama: Any) -> None:
    requests = prepare(llama, [random_ids(4)], max_new_tokens=4, do_sample=False)
    with pytest.raises(RequestError, match="hidden states"):
        stepper_for(llama, None, requests, AcceptanceRule("greedy"), keep_hidden=True, compile=True)
