"""decode/generation.py: arguments and results as in `model.generate`; other requests raise a one-line error."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch.compiler import is_dynamo_compiling
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from decode import generate, medusa_generate, steps
from decode.bench.benchmark import STAGES, StageTimer
from decode.drafters.heads import HeadsDrafter
from decode.drafters.layouts import default_tree, resolve_tree
from decode.drafters.model import DraftModel
from decode.request import _KEPT, prepare
from decode.target import settings_of
from medusa import MedusaConfig, MedusaHeads, RequestError, Tree
from medusa.backbone import Backbone
from medusa.errors import RunError
from medusa.tree import named_trees
from tests.helpers import (
    REFUSED,
    VOCAB,
    at_once,
    left_padded,
    parts_of,
    plain,
    random_heads,
    random_ids,
    tiny_model,
)

PROMPT = torch.tensor([random_ids(6)])
TREE = Tree.top_k([15, 3])
NEW = 16


@pytest.fixture(scope="module")
def heads(llama: Any) -> MedusaHeads:
    return random_heads(llama, 4)


class Recorder:
    """A streamer that records its tokens."""

    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert not self.ends
        self.puts.append(value)

    def end(self) -> None:
        self.ends += 1


# The front doors


def test_public_functions_are_not_shadowed_by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """`decode.generate` is a function: no module may replace it, also after repeated imports."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "decode"]:
        monkeypatch.delitem(sys.modules, name)
    for names in (["generate"], ["generate", "medusa_generate", "steps"]):
        package = __import__("decode", fromlist=names)
        assert all(isinstance(getattr(package, name), FunctionType) for name in names)
    assert isinstance(__import__("decode").generate, FunctionType)


def test_the_defaults_are_those_of_transformers(llama: Any, heads: MedusaHeads) -> None:
    """tests/test_matrix.py has the options, in each of the public functions."""
    assert torch.equal(generate(llama, heads, PROMPT), llama.generate(PROMPT))


def test_a_tree_may_be_given_in_any_form(llama: Any, heads: MedusaHeads) -> None:
    expected = llama.generate(PROMPT, do_sample=False, max_new_tokens=NEW)
    for tree in (TREE, "chain", "chain:2", "topk:2,2", "mc_sim_7b_63", [[0], [1]], [(0,), (0, 4)]):
        assert torch.equal(generate(llama, heads, PROMPT, tree=tree, do_sample=False, max_new_tokens=NEW), expected)


def test_the_tree_saved_with_the_heads_is_the_default(llama: Any) -> None:
    heads = random_heads(llama, 3)
    assert resolve_tree(None, heads).rank_paths == default_tree(heads).rank_paths
    heads.config.tree = [[0], [2]]
    assert resolve_tree(None, heads).rank_paths == [(0,), (2,)]
    assert resolve_tree("chain:1", heads).rank_paths == [(0,)]


def test_the_default_tree_on_a_cpu_is_eight_nodes_as_deep_as_there_are_heads(llama: Any) -> None:
    paths = named_trees()["eight"]
    assert len(paths) == 7
    assert sorted(default_tree(random_heads(llama, 9)).rank_paths) == sorted(map(tuple, paths))
    assert sorted(default_tree(random_heads(llama, 2)).rank_paths) == sorted(tuple(p) for p in paths if len(p) <= 2)


@pytest.mark.parametrize("options", [{"repetition_penalty": 1.3}, {"do_sample": True, "temperature": 0.7, "top_k": 9}])
def test_dict_and_scores_are_those_of_transformers(llama: Any, heads: MedusaHeads, options: dict) -> None:
    common = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    common |= options
    torch.manual_seed(3)
    theirs = llama.generate(PROMPT, **common)
    torch.manual_seed(3)
    ours = generate(llama, heads, PROMPT, tree=TREE, **common)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores)
    for mine, other in zip(ours.scores, theirs.scores, strict=True):
        assert mine.shape == other.shape
        # A forward over 61 nodes sums in another order than one over a token: float32 roundings of values around 10.
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    only = generate(llama, heads, PROMPT, max_new_tokens=NEW, return_dict_in_generate=True, do_sample=False)
    assert only.scores is None


def test_scores_of_a_batch_belong_to_their_tokens(llama: Any, heads: MedusaHeads) -> None:
    prompts = [random_ids(5, seed=1), random_ids(5, seed=2)]
    options = {"max_new_tokens": NEW, "return_dict_in_generate": True, "output_scores": True, "do_sample": False}
    out = generate(llama, heads, torch.tensor(prompts), **options)
    assert torch.stack(out.scores, 1).argmax(-1).tolist() == out.sequences[:, 5:].tolist()


def test_a_streamer_gets_every_token_once_and_the_end(llama: Any, heads: MedusaHeads) -> None:
    streamer = Recorder()
    out = generate(llama, heads, PROMPT, tree=TREE, streamer=streamer, do_sample=False, max_new_tokens=NEW)
    assert torch.equal(streamer.puts[0], PROMPT), "first the prompt, as transformers does"
    assert all(value.dim() == 1 for value in streamer.puts[1:])
    assert torch.cat(streamer.puts[1:]).tolist() == out[0, 6:].tolist()
    assert streamer.ends == 1


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(("family", "compile"), [("gemma2", False), ("llama", True)])
def test_a_copy_made_while_a_text_is_decoded_is_a_clean_model(family: str, compile: bool) -> None:
    """Made in every eager forward, also of tests, as by another thread; and between steps of a batch."""
    model, batch = tiny_model(family), torch.tensor([random_ids(5), random_ids(5, seed=1)])
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    texts = [plain(model, prompt.tolist(), **settings) for prompt in batch]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    copies = list[Any]()

    def make(*_: Any, **__: Any) -> torch.Tensor:
        copies.append(pickle.loads(pickle.dumps(model)) if len(copies) == 1 else copy.deepcopy(model))
        assert all(map(torch.equal, model.state_dict().values(), state.values()))
        return torch.zeros(len(batch), dtype=torch.bool)

    heads, options = random_heads(model), settings | {"compile": compile}
    handle = model.model.layers[0].mlp.register_forward_hook(in_forward)
    parts = parts_of(model)
    DUE.append(make)
    generate(model, heads, batch, **options)
    DUE.clear()
    before = len(copies)
    generate(model, heads, batch[:1], stopping_criteria=[lambda ids, scores: make()[:1]], **options)
    for _ in steps(model, heads, batch, **options):
        make()
    assert 4 < before < len(copies) - 4
    handle.remove()
    for made in copies:
        assert parts_of(made) == parts
    for made in copies[:3]:
        assert made.generate(batch, **settings)[:, 5:].tolist() == texts
    assert generate(copies[-1], heads, batch, **options)[:, 5:].tolist() == texts


DUE: list[Callable[[], object]] = []


def in_forward(*_: object) -> None:
    """A hook, picklable as a part of a model, that calls what is due in eager forwards."""
    if not is_dynamo_compiling():
        for call in DUE:
            call()


def test_num_return_sequences(llama: Any, heads: MedusaHeads) -> None:
    prompts = [random_ids(5, seed=1), random_ids(5, seed=2)]
    out = generate(llama, heads, torch.tensor(prompts), num_return_sequences=3, do_sample=True, max_new_tokens=8)
    assert out.shape == (6, 13)
    assert out[:, :5].tolist() == [prompts[0]] * 3 + [prompts[1]] * 3
    assert len(set(map(tuple, out.tolist()))) == 6, "samples of their own"


class RowBias(LogitsProcessor):
    """Made for a batch: each row has a bias of its own."""

    bias = torch.randn(2, VOCAB)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + self.bias


class RowLimits(StoppingCriteria):
    """Made for a batch: each row ends at a length of its own."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids.shape[1] >= torch.tensor([6, 8])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"logits_processor": [RowBias()]}, r"RowBias made scores of shape \[2, 61\] from \[1, 61\]"),
        ({"stopping_criteria": [RowLimits()]}, "a stopping criterion answers for 2 texts"),
        (
            {"logits_processor": [PrefixConstrainedLogitsProcessor(lambda row, ids: [row], 1)]},
            "PrefixConstrainedLogitsProcessor was made for the batch.*pass prefix_allowed_tokens_fn instead",
        ),
        ({"num_return_sequences": 2}, "num_return_sequences is 2, and greedy decoding writes one text; add do_sample"),
    ],
    ids=["a bias of each row", "a limit of each row", "allowed tokens of each row", "copies"],
)
def test_what_was_made_for_the_rows_of_a_batch_is_refused(llama: Any, options: dict[str, Any], told: str) -> None:
    """Each text is decoded alone, so it would be applied to the wrong row, or not at all."""
    prompts = torch.tensor([random_ids(5, seed=1), random_ids(5, seed=2)])
    with pytest.raises(RequestError, match=told):
        generate(llama, drafter="ngram", input_ids=prompts, max_new_tokens=6, do_sample=False, **options)


class ReadsText(TemperatureLogitsWarper):
    """A user's warper, which may look at more than scores; as a grammar, it makes another processor."""

    ends = (2,)

    @staticmethod
    def processor(prompt: list[int]) -> LogitsProcessor:
        return MinLengthLogitsProcessor(len(prompt), 1)


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"max_new_tokens": 9}, 1),
        ({"max_new_tokens": 9, "do_sample": True, "temperature": 0.7, "top_p": 0.9}, 1),
        ({"generation_config": GenerationConfig(max_new_tokens=9, eos_token_id=4)}, 1),
        ({"max_new_tokens": 9, "num_return_sequences": 2, "do_sample": True}, 1),
        ({"max_length": 12}, 3),  # a number of new tokens for each prompt
        # The length at which the first text would end anyway, but not the others.
        ({"max_new_tokens": 9, "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(12)])}, 3),
        ({"max_new_tokens": 9, "min_new_tokens": 2, "eos_token_id": 4}, 3),
        ({"max_new_tokens": 9, "repetition_penalty": 1.3}, 3),
        ({"max_new_tokens": 9, "prefix_allowed_tokens_fn": lambda row, ids: [row]}, 3),
        ({"max_new_tokens": 9, "grammar": ReadsText, "eos_token_id": 2}, 3),
        ({"max_new_tokens": 9, "logits_processor": LogitsProcessorList([ReadsText(0.7)])}, 3),
    ],
)
def test_rows_are_prepared_once_if_nothing_depends_on_the_prompt(
    llama: Any, options: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, prompts, prepared = type(llama), [random_ids(n, seed=n) for n in (3, 5, 4)], list[Any]()
    through = kind.generate
    monkeypatch.setattr(kind, "generate", lambda *args, **kwargs: prepared.append(args) or through(*args, **kwargs))
    copies = options.get("num_return_sequences", 1)
    together = prepare(llama, prompts, seeds=list(range(3 * copies)) if "do_sample" in options else None, **options)
    assert len(prepared) == calls
    assert [request.prompt for request in together] == [prompt for prompt in prompts for _ in range(copies)]
    prepare(llama, prompts, **options)
    again = 0 if calls == 1 and "generation_config" not in options else calls  # an object, which may change
    assert len(prepared) == calls + again
    for request in together:
        _KEPT.clear()
        alone, *_ = prepare(llama, [request.prompt], **options)
        assert request.max_new_tokens == alone.max_new_tokens
        if calls == 1:
            assert settings_of(request.processors) == settings_of(alone.processors)
        assert list(map(type, request.criteria)) == list(map(type, alone.criteria))
    with pytest.raises(RequestError, match="a prompt is empty"):
        prepare(llama, [*prompts, []], **options)


@pytest.mark.parametrize("longest", [2, 9])
def test_a_length_criterion_of_the_user_replaces_the_usual_one(llama: Any, heads: MedusaHeads, longest: int) -> None:
    """As in transformers, also where it allows more tokens, or fewer than the prompt has."""
    ids = torch.tensor([random_ids(3)])
    options = {"max_new_tokens": 7, "do_sample": False, "eos_token_id": None}
    expected = llama.generate(ids, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(longest)]), **options)
    assert expected.shape[1] == max(longest, 4)
    criteria = StoppingCriteriaList([MaxLengthCriteria(longest)])
    assert torch.equal(generate(llama, heads, ids, stopping_criteria=criteria, **options), expected)
    custom = {"custom_generate": medusa_generate, "medusa_heads": heads, "stopping_criteria": criteria}
    assert torch.equal(llama.generate(ids, **custom, **options), expected)


@pytest.mark.parametrize(("eos", "pad"), [([9, 3], None), ([3, 9], 5), (9, None)])
def test_rows_that_end_early_are_padded_as_usual(llama: Any, heads: MedusaHeads, eos: Any, pad: Any) -> None:
    batch = left_padded([random_ids(n, seed=n) for n in (3, 5, 6, 7)])
    options = {"max_new_tokens": 20, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    theirs = llama.generate(**batch, **options)
    last = pad if pad is not None else eos[0] if isinstance(eos, list) else eos
    assert last in theirs[:, -1].tolist(), "no row was padded: no power"
    assert torch.equal(generate(llama, heads, **batch, **options), theirs)


def test_pad_tokens_inside_a_prompt_are_ordinary_tokens(llama: Any, heads: MedusaHeads) -> None:
    """No mask is derived from an id: with an explicit mask of ones, pads are read like any other token."""
    prompt = torch.tensor([[0, 4, 0, 7, 0]])
    options = {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False}
    mask = torch.ones_like(prompt)
    expected = llama.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(generate(llama, heads, prompt, attention_mask=mask, **options), expected)
    expected = llama.generate(prompt[:, 1:], attention_mask=mask[:, 1:], **options)
    written = [t for step in steps(llama, heads, prompt[:, 1:], **options) for t in step.ids[0]]
    assert written == expected[0, 4:].tolist()


def test_typical_is_deterministic_with_any_seed(llama: Any, heads: MedusaHeads) -> None:
    """Every root is the most probable token, including the first."""
    texts = set()
    for seed in range(6):
        torch.manual_seed(seed)
        options = {"acceptance": "typical", "do_sample": True, "temperature": 2.0, "max_new_tokens": NEW}
        out = generate(llama, heads, PROMPT, tree=TREE, **options)
        texts.add(tuple(out[0].tolist()))
    assert len(texts) == 1


def test_typical_without_tolerance_is_greedy(llama: Any, heads: MedusaHeads) -> None:
    """With epsilon = delta = 1 the threshold is exp(-H), which only the most probable tokens pass, if any."""
    expected = llama.generate(PROMPT, do_sample=False, max_new_tokens=NEW)
    options = {"acceptance": "typical", "epsilon": 1, "delta": 1, "do_sample": True, "temperature": 0.01}
    out = generate(llama, heads, PROMPT, tree="chain", max_new_tokens=NEW, **options)
    assert torch.equal(out, expected)


def test_heads_of_another_dtype_than_the_backbone() -> None:
    """Heads are often stored in float16 or float32 for a bfloat16 backbone, as in the README's first example."""
    for model_dtype, heads_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        model = tiny_model("llama", dtype=model_dtype)
        heads = random_heads(model).to(heads_dtype)
        try:
            out = generate(model, heads, PROMPT, max_new_tokens=4, do_sample=False)
        except RequestError:
            continue  # said in words is well too
        assert out.shape == (1, 10)


def test_the_timer_names_every_stage(llama: Any, heads: MedusaHeads) -> None:
    clock = StageTimer()
    list(steps(llama, heads, PROMPT, timer=clock, max_new_tokens=NEW, do_sample=False))
    assert set(clock.seconds) == set(STAGES)
    assert all(seconds > 0 for seconds in clock.seconds.values())


# Refusals


def heads_of(**settings: Any) -> MedusaHeads:
    return MedusaHeads(MedusaConfig(**({"hidden_size": 32, "vocab_size": VOCAB, "num_heads": 2} | settings)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tree": "chain:5"}, "5 deep but there are 4 heads"),
        ({"tree": [[VOCAB]]}, str(VOCAB)),
        ({"tree": "topk:"}, "topk:"),
        ({"tree": 5}, "5"),
        ({"heads": heads_of(hidden_size=16)}, "hidden size 16"),
        ({"heads": heads_of(vocab_size=VOCAB + 1)}, "62"),
        ({"heads": heads_of(vocab_size=VOCAB + 1, lm_head="shared")}, "62"),
        ({"heads": None}, "heads"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "empty"),
        ({"input_ids": torch.tensor([[1, VOCAB]])}, str(VOCAB)),
        ({"input_ids": torch.tensor([[1, -1]])}, "-1"),
        ({"input_ids": torch.zeros(1, 129, dtype=torch.long)}, "129"),
        ({"attention_mask": torch.zeros(1, 6, dtype=torch.long)}, "empty"),
        ({"acceptance": "optimistic"}, "optimistic"),
        ({"stop_strings": "x"}, "tokenizer"),
        ({"acceptance": "typical", "do_sample": True, "output_logits": True}, "output_logits"),
        ({"draft": "sample"}, "temperature above 0"),
        ({"acceptance": "typical-sampled"}, "temperature above 0"),
        ({"do_sample": True, "seeds": [1, 2]}, "2 seeds"),
        ({"do_sample": True, "seeds": [2**70]}, str(2**70)),
        ({"do_sample": True, "seeds": [1.5]}, "1.5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_unsupported_options_raise_a_one_line_error(llama: Any, heads: MedusaHeads, options: dict, named: str) -> None:
    call = {"heads": heads, "input_ids": PROMPT, "do_sample": False, "max_new_tokens": 4} | options
    with pytest.raises(RequestError) as error:
        generate(llama, call.pop("heads"), call.pop("input_ids"), **call)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_streamer_supports_one_prompt_and_medusa_generate_needs_heads(llama: Any, heads: MedusaHeads) -> None:
    with pytest.raises(RequestError, match="streamer"):
        generate(llama, heads, torch.cat([PROMPT, PROMPT]), streamer=Recorder(), max_new_tokens=4)
    with pytest.raises(RequestError, match="medusa_heads"):
        llama.generate(PROMPT, custom_generate=medusa_generate, max_new_tokens=4)


@pytest.mark.parametrize("family", REFUSED)
def test_generate_rejects_models_without_tree_support(family: str) -> None:
    """The models are rejected by name before a forward, which would raise other errors."""
    model = tiny_model(family)
    with pytest.raises(RequestError, match=type(model).__name__):
        generate(model, heads_of(), PROMPT, max_new_tokens=4, do_sample=False)


def test_a_tree_with_only_the_root_is_plain_decoding(
    llama: Any, heads: MedusaHeads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It uses the plain loop, so `auto` costs nothing where speculation does not pay; lossy rules keep their loop."""
    monkeypatch.setattr(HeadsDrafter, "propose", lambda *args: pytest.fail("there is nothing to propose"))
    out = generate(llama, heads, PROMPT, tree=Tree.chain(0), max_new_tokens=NEW, do_sample=False)
    assert out[0, PROMPT.shape[1] :].tolist() == plain(llama, PROMPT[0].tolist(), max_new_tokens=NEW)
    with pytest.raises(pytest.fail.Exception):
        generate(llama, heads, PROMPT, tree="chain:0", max_new_tokens=NEW, do_sample=True, acceptance="typical")


@pytest.mark.parametrize("tree", ["chain", "wide", "dynamic:8"])
def test_steps_keep_their_drafts_on_request(llama: Any, heads: MedusaHeads, tree: str) -> None:
    """The accepted path of each record, walked by its own parents, holds the tokens that the step decided on."""
    shape = {"chain": Tree.chain(3), "wide": TREE}.get(tree, tree)
    given = {"tree": shape, "max_new_tokens": NEW, "do_sample": False, **left_padded([random_ids(6), random_ids(3)])}
    taken, plain = list(steps(llama, heads, **given, keep_drafts=True)), list(steps(llama, heads, **given))
    assert [step.ids for step in taken] == [step.ids for step in plain]
    assert not any(step.drafts for step in plain)
    for step in taken:
        for row, record in step.drafts.items():
            path = record.accepted
            assert len(record.ids) == len(record.parents)
            assert len(path) == step.lengths[row]
            assert [record.parents[node] for node in path] == [0, *path[:-1]]
            tokens = [record.ids[node] for node in path]
            assert tokens[: len(step.ids[row])] == step.ids[row]
    assert any(len(record.ids) > 1 for step in taken for record in step.drafts.values())


def test_compiled_steps_keep_no_drafts(llama: Any, heads: MedusaHeads) -> None:
    with pytest.raises(RequestError, match="compiled steps keep no drafts"):
        steps(llama, heads, torch.tensor([[1, 2]]), max_new_tokens=2, compile=True, keep_drafts=True)


# Arguments of a wrong type, and what transformers drops


WRONG_IDS: list[tuple[Any, str]] = [
    ("Once upon a time", "is 'Once upon a time'; give a LongTensor of shape (batch, length); encode it"),
    ([1, 2, 3], "is [1, 2, 3]; give a LongTensor"),
    (PROMPT[0], "is a tensor of shape (6,) and torch.int64; give a LongTensor of shape (batch, length)"),
    (PROMPT.float(), "is a tensor of shape (1, 6) and torch.float32; give a LongTensor"),
    (PROMPT.numpy(), "give a LongTensor"),
    (5, "is 5; give a LongTensor"),
    ({"input_ids": PROMPT}, "is a dict; pass its tensors"),
]


@pytest.mark.parametrize(("ids", "told"), WRONG_IDS, ids=[str(told) for _, told in WRONG_IDS])
def test_ids_of_another_type_are_named(llama: Any, heads: MedusaHeads, ids: Any, told: str) -> None:
    for call in (
        lambda: generate(llama, heads, ids, max_new_tokens=4),
        lambda: generate(llama, heads, input_ids=ids, max_new_tokens=4),
        lambda: steps(llama, heads, ids, max_new_tokens=4),
        lambda: medusa_generate(llama, ids, [], [], GenerationConfig(max_length=9), medusa_heads=heads),
    ):
        with pytest.raises(RequestError, match=r"^inputs|^input_ids") as error:
            call()
        assert told in str(error.value)


def test_both_names_of_the_prompt(llama: Any, heads: MedusaHeads) -> None:
    for given in ({}, {"inputs": PROMPT, "input_ids": PROMPT}):
        with pytest.raises(RequestError, match="either as inputs or as input_ids"):
            generate(llama, heads, **given)


def test_a_name_is_no_model_and_no_heads(llama: Any, heads: MedusaHeads) -> None:
    with pytest.raises(RequestError, match="model is 'org/model', not a model; load one"):
        generate("org/model", heads, PROMPT)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"the heads are 'runs/heads'; .*MedusaHeads"):
        generate(llama, "runs/heads", PROMPT)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [torch.ones(1, 5), torch.ones(6), [[1] * 6], "ones"])
def test_a_mask_of_another_shape(llama: Any, heads: MedusaHeads, mask: Any) -> None:
    with pytest.raises(RequestError, match=r"^attention_mask is .*shape of input_ids, \(1, 6\)$"):
        generate(llama, heads, PROMPT, attention_mask=mask)


RIGHT_PADDED = torch.tensor([[3, 4, 5, 6], [7, 8, 2, 2]])


def test_prompts_padded_on_the_right_are_refused(llama: Any, heads: MedusaHeads) -> None:
    mask, wrong = (
        (RIGHT_PADDED != 2).long(),
        r"padded on the right: attention_mask hides the end of row 1; pad on the left",
    )
    with pytest.raises(RequestError, match=wrong):
        generate(llama, heads, RIGHT_PADDED, attention_mask=mask, max_new_tokens=4)
    with pytest.raises(RequestError, match=wrong):
        steps(llama, heads, RIGHT_PADDED, attention_mask=mask, max_new_tokens=4)
    with pytest.raises(RequestError, match=wrong):
        llama.generate(
            RIGHT_PADDED, attention_mask=mask, custom_generate=medusa_generate, medusa_heads=heads, max_new_tokens=4
        )
    with pytest.raises(RequestError, match="no attention_mask, and the pad token 2 ends row 1; pad on the left"):
        generate(llama, heads, RIGHT_PADDED, pad_token_id=2, max_new_tokens=4)
    config = GenerationConfig(pad_token_id=2, max_new_tokens=4)
    with pytest.raises(RequestError, match="padded on the right"):
        steps(llama, heads, RIGHT_PADDED, generation_config=config)


@pytest.mark.parametrize("prompts", [RIGHT_PADDED[1:], torch.tensor([[3, 2], [4, 2]])])
def test_a_pad_token_at_the_end_of_all_rows_is_no_padding(llama: Any, heads: MedusaHeads, prompts: Any) -> None:
    options = {"pad_token_id": 2, "do_sample": False, "max_new_tokens": 4}
    expected = llama.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    assert torch.equal(generate(llama, heads, prompts, **options), expected)


@pytest.mark.parametrize(("name", "way"), [("streamer", "medusa_streamer="), ("assistant_model", "drafter=")])
def test_what_transformers_drops_is_named(llama: Any, heads: MedusaHeads, name: str, way: str) -> None:
    dropped = {"streamer": Recorder(), "assistant_model": llama}[name]
    with pytest.raises(RequestError, match=rf"^transformers passes no {name} to custom_generate; .*{way}.*") as error:
        llama.generate(PROMPT, custom_generate=medusa_generate, medusa_heads=heads, max_new_tokens=4, **{name: dropped})
    assert "decode.generate" in str(error.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"stop_drafting": -1}, "stop_drafting is -1; it must be between 0 and 1"),
        ({"compile": True, "stop_drafting": 0.1}, "compile needs steps of one shape, and stop_drafting changes"),
        ({"acceptance": "topk:2", "compile": True}, "compile is not possible: acceptance"),
        ({"tree": "chain:9"}, "the tree chain fits any heads"),
    ],
)
def test_errors_are_in_the_words_of_python(llama: Any, heads: MedusaHeads, options: dict, told: str) -> None:
    with pytest.raises(RequestError) as error:
        generate(llama, heads, PROMPT, do_sample=False, **options)
    assert told in str(error.value)
    inside = {f"medusa_{name}": value for name, value in options.items()}
    with pytest.raises(RequestError) as error:
        llama.generate(PROMPT, custom_generate=medusa_generate, medusa_heads=heads, do_sample=False, **inside)
    assert "--" not in str(error.value)


def test_threads_write_the_texts_that_they_write_alone() -> None:
    """Three threads decode at once with one model, which none of them has used before: the self-tests run too."""
    model = tiny_model("gemma3_text")
    heads, options = random_heads(model, kind="eagle"), {"max_new_tokens": 16, "eos_token_id": None}
    prompts = [random_ids(length, seed=length) for length in (6, 9, 14)]

    def write(index: int) -> list[list[int]]:
        ids = torch.tensor([prompts[index]])
        outs = [generate(model, heads, inputs=ids, tree="topk:3,2", **options) for _ in range(3)]
        return [out[0, ids.shape[1] :].tolist() for out in outs]

    assert at_once(write, len(prompts)) == [[plain(model, prompt, **options)] * 3 for prompt in prompts]


def test_longrope_texts_that_may_pass_the_boundary_are_decoded_alone() -> None:
    model = tiny_model("phi3, longrope")
    heads, boundary = random_heads(model), Backbone(model).rope_boundary
    assert boundary is not None
    both: dict[str, Any] = {"attention_mask": torch.tensor([[0, 1], [1, 1]]), "max_new_tokens": boundary - 1}
    for decode in (
        lambda ids: generate(model, heads, ids, **both),
        lambda ids: model.generate(ids, custom_generate=medusa_generate, medusa_heads=heads, **both),
    ):
        with pytest.raises(RequestError, match=f"once one passes {boundary} tokens; decode one prompt at a time"):
            decode(torch.tensor([[0, 5], [6, 7]]))


def test_the_wrapper_of_a_compiled_model_decodes() -> None:
    """Compiling would take half a minute here, so that the wrapper runs the model as it is."""
    model, prompt = tiny_model("llama", num_hidden_layers=1), random_ids(9)
    wrapped, heads = torch.compile(model), random_heads(model)
    assert type(wrapped) is not type(model)
    with torch.compiler.set_stance("force_eager"):
        out = generate(wrapped, heads, torch.tensor([prompt]), max_new_tokens=12)
    assert out[0, 9:].tolist() == plain(model, prompt, max_new_tokens=12)


@pytest.mark.parametrize("change", [{"eos_token_id": 3}, {"do_sample": True, "top_k": 2}, {"max_time": 1e-9}])
def test_a_prepared_request_follows_the_models_own_options(change: dict[str, Any]) -> None:
    """A limit of time counts from each call on, so such a request is not kept."""
    model, prompt = tiny_model("llama"), random_ids(4)
    for _ in range(2):
        assert prepare(model, [prompt], max_new_tokens=5)[0].config.eos_token_id != 3
    for name, value in change.items():
        setattr(model.generation_config, name, value)
    first, second = (prepare(model, [prompt], [0] if "do_sample" in change else None, max_new_tokens=5) for _ in "ab")
    assert all(
        getattr(request.config, name) == value for request in (*first, *second) for name, value in change.items()
    )
    assert (first[0].criteria is second[0].criteria) == ("max_time" not in change)


def test_each_row_has_its_own_negative_prompt(llama: Any, heads: MedusaHeads) -> None:
    batch, negative = left_padded([random_ids(6, 1), random_ids(9, 2)]), [random_ids(4, 5), random_ids(4, 6)]
    options = {"do_sample": False, "max_new_tokens": 6, "guidance_scale": 3.0}
    given = {"negative_prompt_ids": torch.tensor(negative)}
    expected = llama.generate(**batch, **options, **given)
    assert torch.equal(generate(llama, heads, **batch, tree=TREE, **options, **given), expected)
    three = {"negative_prompt_ids": torch.tensor([*negative, negative[0]])}
    with pytest.raises(RequestError, match="negative_prompt_ids has 3 rows; give one for each of the 2 prompts"):
        generate(llama, heads, **batch, **options, **three)


def test_padding_without_a_mask_is_refused(llama: Any, heads: MedusaHeads) -> None:
    """transformers makes a mask, unless the token is an EOS. A text may begin with BOS, whatever else it is."""
    ids = left_padded([random_ids(6, 1), random_ids(9, 2)], pad=3)["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 4}
    with pytest.raises(RequestError, match="the pad token 3 begins row 0, and there is no attention_mask; pass it"):
        generate(llama, heads, ids, pad_token_id=3, **options)
    with pytest.raises(RequestError, match="the pad token 3 begins row 0"):
        generate(llama, heads, ids[:1], pad_token_id=3, **options)
    assert generate(llama, heads, ids, pad_token_id=3, eos_token_id=[3, 5], **options).shape[0] == 2
    assert generate(llama, heads, ids, pad_token_id=3, bos_token_id=3, **options).shape[0] == 2


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        (5, "seeds is 5; give a list with one seed per row"),
        ([True], "seeds holds True"),
        ([1, 2], "2 seeds were given for 1 rows"),
    ],
)
@pytest.mark.parametrize("do_sample", [True, False])
def test_wrong_seeds_are_refused(llama: Any, heads: MedusaHeads, seeds: Any, said: str, do_sample: bool) -> None:
    with pytest.raises(RequestError, match=said):
        generate(llama, heads, PROMPT, max_new_tokens=2, do_sample=do_sample, seeds=seeds)


def test_no_prompts_are_refused(llama: Any, heads: MedusaHeads) -> None:
    with pytest.raises(RequestError, match="there are no prompts"):
        generate(llama, heads, torch.zeros(0, 5, dtype=torch.long), max_new_tokens=2)


# --- the end of a text ------------------------------------------------------------------------------------------------


CYCLE = [7, 8, 9, 4]  # a text that repeats its prompt, so that drafts go on after each end


class Cycle(LogitsProcessor):
    """A user's processor that has a token for each place of a text, and nothing for one after its end."""

    def __init__(self, end: int) -> None:
        self.end, self.calls = end, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        new = input_ids.shape[1] - 8
        assert new < self.end
        self.calls.append(new)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, CYCLE[new % 4]] = 0.0
        return forced


@pytest.mark.parametrize("drafter", ["ngram", "ngram:tokens=1", "model"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_nothing_is_asked_after_the_end_of_a_text(llama: Any, drafter: str, do_sample: bool) -> None:
    """A usual trie allows nothing after a label, and a draft may hold more."""
    prompt, made = torch.tensor([2 * CYCLE]), drafter if drafter != "model" else DraftModel(llama, Tree.top_k([60, 60]))
    ends: list[tuple[int, int | None]] = [(6, None), (12, 9)]
    ends += [(1, None), (5, None), (12, 4)] if drafter != "model" else []  # whose trees are large
    for new, eos in ends:
        end = CYCLE.index(eos) + 1 if eos else new
        cycle, options = Cycle(end), {"max_new_tokens": new, "eos_token_id": eos, "pad_token_id": 0}
        processors = LogitsProcessorList([cycle])
        found = generate(llama, None, prompt, drafter=made, logits_processor=processors, do_sample=do_sample, **options)
        assert found[0, 8:].tolist() == (3 * CYCLE)[:end]
        assert cycle.calls == list(range(end)), "once for each token, in order"


class AtToken(EosTokenCriteria):
    """Ends a text at its second end token; transformers' own would end it at the first."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.isin(input_ids[:, PROMPT.shape[1] :], self.eos_token_id).sum(1) >= 2


class AtLength(MaxLengthCriteria):
    """Counts new tokens; transformers' own counts the prompt, too."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([input_ids.shape[1] - PROMPT.shape[1] >= self.max_length] * len(input_ids))


class Unsure(StoppingCriteria):
    """Ends a text at a token of little probability, and notes the scores that it is given."""

    def __init__(self) -> None:
        self.seen: list[list[list[float]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append([score[0].tolist() for score in scores])
        return torch.tensor([bool(len(scores) > 9 and scores[-1].softmax(-1).max() < 0.9)])


@pytest.mark.parametrize("do_sample", [False, True])
def test_criteria_read_the_scores_that_a_call_returns(llama: Any, heads: MedusaHeads, do_sample: bool) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "do_sample": do_sample}
    options |= {"return_dict_in_generate": True, "output_scores": True, "attention_mask": torch.ones_like(PROMPT)}
    texts, asked = [], []
    for run in (llama.generate, lambda *a, **k: generate(llama, heads, *a, tree=TREE, **k)):
        torch.manual_seed(3)
        criterion = Unsure()
        texts.append(run(PROMPT, stopping_criteria=StoppingCriteriaList([criterion]), **options).sequences)
        asked.append([torch.tensor(scores) for scores in criterion.seen])
    assert torch.equal(*texts)
    assert PROMPT.shape[1] + 9 < texts[0].shape[1] < PROMPT.shape[1] + 20, "no power"
    for theirs, ours in zip(*asked, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["token", "length"])
def test_a_users_own_kind_of_a_criterion_is_asked(llama: Any, heads: MedusaHeads, kind: str) -> None:
    free = plain(llama, PROMPT[0].tolist(), max_new_tokens=20, eos_token_id=None)
    twice = next(token for token in free if free.count(token) > 1)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"], texts = torch.ones_like(PROMPT), []
    for run in (llama.generate, lambda *a, **k: generate(llama, heads, *a, tree=TREE, **k)):
        criterion = AtToken(twice) if kind == "token" else AtLength(7)
        texts.append(run(PROMPT, stopping_criteria=StoppingCriteriaList([criterion]), **options))
    assert torch.equal(*texts)
    assert texts[0].shape[1] < PROMPT.shape[1] + 20, "no power"


@pytest.mark.parametrize("ending", ["length", "eos", "criterion"])
@pytest.mark.parametrize("tree", [Tree.top_k([5, 5]), Tree.chain(3)])
def test_samples_after_one_seed_equal_those_of_transformers(llama: Any, ending: str, tree: Tree) -> None:
    """No draw is made, or kept, after the end of a text, so that the next text draws as after plain decoding."""
    drafter = DraftModel(llama, tree)
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    options["attention_mask"] = torch.ones_like(PROMPT)
    if ending == "eos":
        options |= {"eos_token_id": list(range(8))}
    elif ending == "criterion":
        options |= {"stopping_criteria": StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] < 8])}
    texts = []
    for run in (llama.generate, lambda *a, **k: generate(llama, None, *a, drafter=drafter, **k)):
        torch.manual_seed(3)
        texts.append([run(PROMPT, **options)[0].tolist() for _ in range(6)])
    assert texts[0] == texts[1]
    if ending != "length":
        assert any(len(text) < PROMPT.shape[1] + 9 for text in texts[0]), "no power"


@pytest.mark.parametrize("do_sample", [False, True])
def test_options_that_exclude_every_token_are_named(llama: Any, heads: MedusaHeads, do_sample: bool) -> None:
    """Greedy decoding wrote the id 0, and sampling blamed the dtype."""
    allowed: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda row, ids: list(range(VOCAB)), "max_new_tokens": 9}

    class Nothing(LogitsProcessor):
        """Excludes every token from the third one on."""

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
            ends = input_ids.shape[1] > PROMPT.shape[1] + 1
            return torch.full_like(scores, -torch.inf) if ends else scores

    for rule in ("rejection", "typical") if do_sample else ("rejection", "topk:2", "distance:2"):
        options = allowed | {"do_sample": do_sample, "acceptance": rule, "logits_processor": [Nothing()]}
        with pytest.raises(RunError, match="no next token can be chosen: the options exclude every token"):
            generate(llama, heads, PROMPT, tree=TREE, **options)


def test_a_users_own_kind_of_a_warper_sees_the_text_even_if_drafts_are_drawn(llama: Any) -> None:
    class Cooling(TemperatureLogitsWarper):
        seen: list[int]

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
            self.seen.append(input_ids.shape[1])
            return scores / (1 + 0.1 * (input_ids.shape[1] - PROMPT.shape[1]))

    cooling = Cooling(1.0)
    cooling.seen = []
    options = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None, "draft": "sample"}
    generate(llama, None, PROMPT, drafter=DraftModel(llama, Tree.chain(3)), logits_processor=[cooling], **options)
    assert cooling.seen == list(range(PROMPT.shape[1], PROMPT.shape[1] + 6))


def test_seeds_reach_a_custom_method(llama: Any, heads: MedusaHeads) -> None:
    options = {"do_sample": True, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    batch = left_padded([random_ids(6, 1), random_ids(9, 2)])
    expected = generate(llama, heads, **batch, tree=TREE, seeds=[4, 5], **options)
    given = {"medusa_heads": heads, "medusa_tree": TREE, "medusa_seeds": [4, 5]}
    assert torch.equal(llama.generate(**batch, custom_generate=medusa_generate, **given, **options), expected)


@pytest.mark.parametrize("count", [4, 4.0, 3.5])
def test_a_number_of_tokens_need_not_be_an_integer(count: float) -> None:
    """transformers ends a text at the first token from this number on."""
    model, ids = tiny_model(), torch.tensor([random_ids(5)])
    expected = model.generate(ids, max_new_tokens=count, do_sample=False)
    assert torch.equal(generate(model, random_heads(model), ids, max_new_tokens=count, do_sample=False), expected)
    assert expected.shape[1] == 9
