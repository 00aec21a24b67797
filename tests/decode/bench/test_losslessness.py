"""`medusa verify`: correct decoding passes, and planted faults are found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

import decode.accept
import decode.bench.losslessness.experiment as experiments
import decode.reader
from decode.accept import TreeWalk
from decode.bench.losslessness.cases import FALSE_ALARM, RULES, SLOW_SHARE, Case, Rule, passes, rules_for, threshold
from decode.bench.losslessness.compiled import CompiledDecisions
from decode.bench.losslessness.experiment import Experiment, narrowed
from decode.bench.losslessness.verify import Verification, compare_greedy, tie_bound, verify
from decode.bench.methods import medusa_method, plain_method
from decode.compiled import region, sampling
from decode.compiled.sampling import gumbel
from decode.drafters.layouts import DynamicTree
from decode.drafters.trained_heads import TrainedHeads
from decode.reader import Reader, additive_masks
from decode.settings import Settings
from decode.texts import Result
from medusa import Tree
from medusa.errors import RequestError
from medusa.loading import Loaded
from medusa.tree import load_tree
from tests.helpers import FORMS, VOCAB, random_heads, random_ids, random_tree, rename_attention, tiny_model, weekly

DRAWS = 30_000
PROMPT = random_ids(7, seed=3)


def experiment_of(model: Any, source: TrainedHeads, prompt: list[int] = PROMPT, **settings: Any) -> Experiment:
    options = Settings(**({"temperature": 1.0} | settings))
    return Experiment(model, source, prompt, options, torch.Generator().manual_seed(0))


def experiment(model: Any, **settings: Any) -> Experiment:
    tree = Tree.from_paths([[0], [1], [4], [0, 0], [0, 2], [1, 0], [0, 0, 0]])
    return experiment_of(model, TrainedHeads(random_heads(model, 3), tree), **settings)


def cases_of(model: Any, rules: Sequence[Rule] = RULES, **settings: Any) -> list[Case]:
    made = experiment(model, **settings)
    return [made.run(rule, 0, DRAWS) for rule in rules]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama", initializer_range=0.15)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.97},
    {"top_k": 40, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_lossless_rules_pass_and_lossy_rules_differ(model: Any, settings: dict[str, Any]) -> None:
    cases = cases_of(model, **settings)
    assert passes(cases)
    assert [case.rule for case in cases if case.joint.p_value < 1e-12] == [rule for rule in RULES if not rule.is_judged]
    for case in cases[:2]:
        assert case.first.draws == DRAWS
        assert case.second.draws > 500, "hardly any second token was counted: no power"
        assert 0 < case.mean_accepted < 2


def compiled_verification(model: Any, prompts: list[list[int]], **settings: Any) -> Verification:
    source, how = (
        TrainedHeads(random_heads(model), Tree.top_k([2, 1])),
        Settings(max_new_tokens=4, compile=True, **settings),
    )
    loaded = Loaded(model, None, "a model")
    return Verification(loaded=loaded, source=source, settings=how, prompts=prompts, draws=DRAWS // 2)


def test_samples_of_compiled_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts share the code of each rule. A sampler that draws as at a lower temperature is found."""
    made: list[str] = []
    monkeypatch.setattr(region, "compiled", lambda step, *how: made.append(type(step.__self__).__name__) or step)
    found = verify(compiled_verification(model, [PROMPT, random_ids(9)], repetition_penalty=1.5))
    assert found.passed
    assert made.count("Decisions") == 2
    assert {case.rule.draft for case in found.cases} == {"topk"}
    assert {case.first.draws for case in found.cases} == {DRAWS / 2 / SLOW_SHARE}
    monkeypatch.setattr(sampling, "gumbel", lambda *asked: gumbel(*asked) / 1.5)
    found = verify(compiled_verification(model, [PROMPT]))
    assert found.greedy.passed
    assert not found.passed


@pytest.mark.usefixtures("traced")
def test_decisions_are_captured_whole(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for all prompts, also of dynamic trees."""
    monkeypatch.setattr(experiments, "MAX_ROWS", 0)  # few draws at once
    random, counters = torch.Generator().manual_seed(0), torch._dynamo.utils.counters["stats"]
    compiled, before = CompiledDecisions(random), counters["unique_graphs"]
    source = TrainedHeads(random_heads(model, 3), DynamicTree.over_heads(4, 2))
    for prompt, temperature in ((PROMPT, 0.7), (random_ids(9), 1.0)):
        options = Settings(temperature=temperature)
        assert passes([Experiment(model, source, prompt, options, random, compiled).run(RULES[0], 0, DRAWS // 4)])
    assert counters["unique_graphs"] - before == 1


STATIC, DYNAMIC = Tree.top_k([12, 2]), DynamicTree.over_heads(20, 3)


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        *((STATIC, kind) for kind in ("markov", "recurrent", "eagle-1", "dflash")),
        *((DYNAMIC, kind) for kind in ("cascade", "hydra", "eagle-3, variants", "mtp", "dflash, pairwise")),
        *weekly(*((STATIC, kind) for kind in ("cascade", "eagle-3", "dflash, markov"))),
        *weekly(*((DYNAMIC, kind) for kind in ("markov", "eagle"))),
    ],
)
def test_every_kind_of_heads_and_a_dynamic_tree(model: Any, tree: Any, kind: str) -> None:
    heads, rules = random_heads(model, 3, **FORMS[kind]), [rule for rule in RULES[:4] if not rule.whole]
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(0.3)  # otherwise almost nothing would be accepted
    made = experiment_of(model, TrainedHeads(heads, tree))
    cases = [made.run(rule, 0, DRAWS) for rule in rules]
    assert passes(cases)
    assert [case.joint.p_value < 1e-12 for case in cases] == [not rule.is_judged for rule in rules]
    assert all(case.second.draws > 500 for case in cases[:2]), "hardly any second token was counted: no power"


@pytest.mark.parametrize(("family", "dtype"), [("mistral", torch.float64), ("gemma3_text", torch.bfloat16)])
def test_other_models_and_dtypes(family: str, dtype: torch.dtype) -> None:
    """Below float32 the target comes from the tree's own forward, so its rounding is part of the target."""
    made = experiment(tiny_model(family, dtype=dtype, initializer_range=0.15))
    assert made.is_independent == (dtype == torch.float64)
    assert passes([made.run(rule, 0, DRAWS) for rule in RULES[:2]])


@pytest.mark.parametrize("rule", RULES[:2])
def test_rounding_that_differs_between_forwards_is_no_evidence(
    model: Any, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below float32, logits depend on the other nodes of a forward; here by far more than a sample overlooks."""
    read = Reader.__call__

    def rounded(self: Any, draft: Any) -> Any:
        found = read(self, draft)
        tilt = torch.linspace(0, 0.02 * draft.topology.num_nodes, VOCAB, dtype=found.logits.dtype)
        return found._replace(logits=found.logits + tilt)

    monkeypatch.setattr(Reader, "__call__", rounded)
    assert passes([experiment(tiny_model("llama", dtype=torch.bfloat16, initializer_range=0.15)).run(rule, 0, DRAWS)])
    assert not passes([experiment(model).run(rule, 0, DRAWS)]), "the difference is too small to be seen: no power"


FAULTS = {
    "q left out": ("passes_ratio", lambda u, p, q: u < p),
    "residual left out": ("residual", lambda p, q: p),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_production_code_fails(model: Any, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode.accept, *FAULTS[fault])
    assert not passes(cases_of(model, [Rule("rejection", "sample")]))


def test_siblings_in_another_order_fail(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Siblings from index `first` on are tried in reverse order; nodes with two children have none from 2 on."""
    children = TreeWalk.children

    def reordered(self: TreeWalk, depth: int, first: int) -> Any:
        found = children(self, depth)
        return torch.cat([found[:, :first], found[:, first:].flip(1)], dim=1)

    made = experiment_of(model, TrainedHeads(random_heads(model, 3), Tree.top_k([4, 3])))
    drawn = [rule for rule in rules_for(made.source) if rule.draft == "sample"]
    cases = ((4, [True, True], 1), (2, [True, False], 20), (0, [False, False], 5))
    for first, passing, draws in cases:
        monkeypatch.setattr(TreeWalk, "children", partialmethod(reordered, first=first))
        assert [passes([made.run(rule, 0, draws * DRAWS)]) for rule in drawn] == passing


def test_whole_trees_are_drawn_where_a_node_has_more_than_two_children(model: Any) -> None:
    heads = random_heads(model, 3)
    for tree, is_wide in ((Tree.top_k([3]), True), (Tree.top_k([2, 3]), True), (Tree.top_k([2, 2, 3]), False)):
        assert any(rule.whole for rule in rules_for(TrainedHeads(heads, tree))) == is_wide
    assert not any(rule.whole for rule in rules_for(TrainedHeads(heads, DynamicTree.over_heads(20, 3))))


def test_a_missing_warper_in_the_tree_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = experiment(model, temperature=0.8)
    monkeypatch.setattr(made.context.session.target, "processors", [LogitsProcessorList()])
    assert not passes([made.run(RULES[0], 0, DRAWS)])


def test_a_mask_that_hides_no_node_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target comes from plain forwards, so a wrong forward of the tree is found too."""
    monkeypatch.setattr("decode.reader.additive_masks", lambda *asked: additive_masks(*asked) * 0)
    assert not passes([experiment(model).run(RULES[0], 0, DRAWS)])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompts_up_to_the_longest_that_leaves_room(family: str) -> None:
    """A root and a first token fill the context; GPT-2 has no embedding for more positions."""
    short = tiny_model(family, max_position_embeddings=32, initializer_range=0.15)

    def made(length: int) -> Experiment:
        return experiment_of(short, TrainedHeads(random_heads(short, 3), Tree.top_k([2, 2, 1])), random_ids(length))

    assert passes([made(30).run(rule, 0, DRAWS) for rule in RULES[:2]])
    with pytest.raises(RequestError, match="may have 30"):
        made(31)


def test_the_false_alarm_rate_is_divided_among_the_tests(model: Any) -> None:
    cases = cases_of(model)
    assert threshold(cases) == pytest.approx(FALSE_ALARM / 4 / 8)  # four rules, two tests each
    one = cases[0]
    one.first = one.first._replace(p_value=threshold(cases) / 2)
    assert not passes(cases)
    one.first = one.first._replace(p_value=0.5)
    assert passes(cases)
    cases[1].second = cases[1].second._replace(p_value=math.nan)  # not the first of all p-values
    cases[1].first = cases[1].first._replace(p_value=math.nan)
    assert not passes(cases)


def test_the_json_has_the_documented_fields(model: Any) -> None:
    lines = [line for case in cases_of(model, RULES[:2]) for line in case.to_json()]
    names = {"prompt", "temperature", "top_p", "tokens", "draft", "acceptance", "total_variation", "std_of_difference"}
    assert all(names | {"chi2_p_value", "expected_std"} <= set(line) for line in lines)
    assert [line["draft"] for line in lines] == ["topk", "topk", "sample", "sample"]
    assert [line["tokens"] for line in lines] == [1, 2, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_a_narrowed_tree_keeps_the_first_children(seed: int) -> None:
    tree = replace(random_tree(25, seed), shortlist=8)
    narrow = narrowed(tree, 2)
    assert narrow.shortlist == 8
    kept = set(narrow.rank_paths)
    assert kept <= set(tree.rank_paths)
    for path in tree.rank_paths:
        siblings = sorted(other for other in tree.rank_paths if other[:-1] == path[:-1])
        assert (path in kept) == ((path[:-1] in kept or len(path) == 1) and siblings.index(path) < 2)


# Greedy


def methods(model: Any, tokens: int = 10) -> tuple[Any, Any]:
    settings = Settings(max_new_tokens=tokens)
    return plain_method(model, settings), medusa_method(model, random_heads(model), settings, tree="topk:3,2")


@pytest.mark.parametrize("batch_size", [1, 3])
def test_equal_texts_are_counted(model: Any, batch_size: int) -> None:
    prompts = [random_ids(4 + i, seed=i) for i in range(4)]
    progress: list[int] = []
    greedy = compare_greedy(model, *methods(model), prompts, batch_size, lambda: progress.append(1))
    assert (greedy.prompts, greedy.equal, greedy.divergences, greedy.passed) == (4, 4, [], True)
    assert len(progress) == 4


def altered(model: Any, change: Any) -> Any:
    """A method that writes the plain text, changed by `change`."""

    def decode(prompts: Sequence[list[int]], on_step: Any = None, seeds: Any = None) -> list[Result]:
        results = methods(model)[0](prompts)
        for result in results:
            result.new_ids = change(list(result.new_ids))
        return results

    return decode


def test_a_wrong_token_is_reported_with_both_gaps(model: Any) -> None:
    right = methods(model)[0]([PROMPT])[0].new_ids
    wrong = (right[4] + 1) % VOCAB
    greedy = compare_greedy(model, methods(model)[0], altered(model, lambda ids: [*ids[:4], wrong, *ids[5:]]), [PROMPT])
    (found,) = greedy.divergences
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + right[:4]])).logits[0, -1].double()
    assert (found.prompt, found.position, found.plain_token, found.medusa_token) == (0, 4, right[4], wrong)
    assert found.gap == pytest.approx(float(logits[right[4]] - logits[wrong]))
    top = logits.topk(2).values
    assert found.top2_gap == pytest.approx(float(top[0] - top[1]))
    assert not greedy.passed


def test_a_text_that_ends_early_is_not_explained_by_rounding(model: Any) -> None:
    greedy = compare_greedy(model, methods(model)[0], altered(model, lambda ids: ids[:7]), [PROMPT])
    (found,) = greedy.to_json()["divergences"]
    assert (found["position"], found["medusa_token"], found["gap"], found["is_rounding"]) == (7, None, None, False)
    assert not greedy.passed


def test_ties_are_distinguished_from_errors(model: Any) -> None:
    """Two tokens with the same LM head row: rounding decides which of them is best."""
    twin = tiny_model("llama", initializer_range=0.15)
    with torch.no_grad():
        twin.lm_head.weight[5] = twin.lm_head.weight[9]
        twin.lm_head.weight[[5, 9]] *= 4
    prompt = next(
        p for p in (random_ids(6, seed=s) for s in range(60)) if 5 in methods(twin)[0]([p])[0].new_ids
    )  # argmax takes the first of equals
    swapped = altered(twin, lambda ids: [9 if token == 5 else token for token in ids])
    greedy = compare_greedy(twin, methods(twin)[0], swapped, [prompt])
    assert (greedy.ties, greedy.passed, greedy.equal) == (1, True, 0)
    assert not compare_greedy(twin.double(), methods(twin)[0], swapped, [prompt]).divergences[0].bound


def test_penalties_decide_what_is_a_tie(model: Any) -> None:
    """Greedy decoding takes the best token after them; logits alone may be far apart, or equal."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    old = max(PROMPT, key=lambda token: float(logits[token]))
    new = int(logits.where(~torch.isin(torch.arange(VOCAB), torch.tensor(PROMPT)), float("-inf")).argmax())
    assert logits[old] > 0 < logits[new]

    def found(penalty: float) -> Any:
        def one(token: int) -> Any:
            return lambda prompts, *_, **__: [Result(list(PROMPT), [token])]

        return compare_greedy(model, one(new), one(old), [PROMPT], options={"repetition_penalty": penalty})

    tied = float(logits[old] / logits[new])
    assert abs(tied - 1) > 0.01, "or the logits are tied, too"
    assert found(tied).passed
    assert not found(1.0).passed
    assert not found(tied * 1.1).passed


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_rounding_is_told_from_errors_at_any_scale_of_the_logits(dtype: torch.dtype, error: float, scale: int) -> None:
    """Rounding: a text read token by token. The error, a share of the largest logit, is one of the masks or caches."""
    model, ids = tiny_model("llama", initializer_range=0.15), torch.tensor([random_ids(24)])
    with torch.no_grad():
        model.lm_head.weight.mul_(scale / model(ids).logits.abs().max())
        model.to(dtype)
        whole, cache, found = model(ids).logits[0].double(), None, []
        for token in ids[0]:
            read = model(token[None, None], past_key_values=cache, use_cache=True)
            cache = read.past_key_values
            found.append(read.logits[0, -1].double())
    best = whole.topk(2).indices
    one, other = (logits.gather(1, best) for logits in (whole, torch.stack(found)))
    changes = ((one[:, 0] - one[:, 1]) - (other[:, 0] - other[:, 1])).abs()
    bounds = [tie_bound(dtype, float(logits.abs().max())) for logits in whole]
    assert changes.max() > 0
    assert all(change <= bound for change, bound in zip(changes.tolist(), bounds, strict=True))
    assert max(bounds) < error * float(whole.abs().max())


def test_no_gap_is_allowed_in_float64() -> None:
    assert tie_bound(torch.float64, 20.0) == 0
    assert tie_bound(torch.float16, 16.0) == 8 * 16 * 2**-10


def test_verify_compares_with_generate_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our forwards changes our plain decoding alike, so comparing with it shows nothing."""
    rename_attention(monkeypatch)
    monkeypatch.setattr("decode.texts.require_tree_forward", lambda model: None)  # or decoding would refuse
    falcon = tiny_model("falcon")
    assert compare_greedy(falcon, *methods(falcon), [PROMPT]).passed
    for model, equal in ((falcon, 0), (tiny_model("llama"), 1)):
        loaded, source = Loaded(model, None, "a model"), TrainedHeads(random_heads(model), Tree.top_k([3, 2]))
        settings = Settings(max_new_tokens=10)
        asked = Verification(loaded=loaded, source=source, settings=settings, prompts=[PROMPT], draws=1000)
        assert verify(asked).greedy.equal == equal


def test_cases_use_the_given_tree(model: Any) -> None:
    source = TrainedHeads(random_heads(model), load_tree("chain:1", 3))
    made = experiment_of(model, source)
    cases = [made.run(rule, 0, DRAWS) for rule in RULES[:2]]
    assert passes(cases)
    assert all(case.mean_accepted < 1 for case in cases)
