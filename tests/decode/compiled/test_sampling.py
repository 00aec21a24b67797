"""Sampling in compiled steps (decode/compiled/sampling.py): transformers' processors are the oracle of its tensors."""

from __future__ import annotations

from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EtaLogitsWarper, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from decode.bench.losslessness.chi2 import goodness_of_fit
from decode.compiled import region, sampling
from decode.compiled.region import Regions
from decode.compiled.sampling import Kind, Sampler, gumbel
from decode.compiled.stepper import _has_compiler
from decode.draft import Draft
from decode.drafters.layouts import resolve_tree
from decode.drafters.trained_heads import TrainedHeads
from decode.ops.draws import NO_TOKEN
from decode.request import prepare
from decode.rules import AcceptanceRule
from decode.sequences import Request, Sequences
from decode.target import Target, settings_of, truncated
from decode.texts import Decoding, stepper_for
from decode.topology import Topology
from medusa import Tree
from medusa.errors import RequestError
from tests.helpers import VOCAB, plain, random_heads, random_ids, random_tree, shared_model, tiny_model

FALSE_ALARM = 1e-5
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, penalty": {"do_sample": False, "repetition_penalty": 1.4},
    "temperature": SAMPLED | {"temperature": 0.7},
    "penalty below 1": SAMPLED | {"repetition_penalty": 0.6},
    "top-k": {"do_sample": True, "top_k": 5},
    "top-p": SAMPLED | {"top_p": 0.8},
    "small top-p": SAMPLED | {"top_p": 0.01},
    "min-p": SAMPLED | {"min_p": 0.3},
    "all": SAMPLED | {"top_k": 9, "top_p": 0.85, "min_p": 0.2, "temperature": 1.6, "repetition_penalty": 1.2},
}
TREE = random_tree(12, max_depth=3)


def requests_of(model: Any, prompts: list[list[int]], names: list[str], new: int = 24) -> list[Request]:
    """A request for each prompt, with the options of its own name and a seed of its own."""
    found = []
    for seed, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        options = {"max_new_tokens": new, "eos_token_id": None} | OPTIONS[name]
        found += prepare(model, [prompt], [seed] if options["do_sample"] else None, **options)
    return found


heads_of = cache(random_heads)


def written(model: Any, requests: list[Request], tree: Any = TREE, rule: str = "", compile: bool = True) -> Any:
    heads = heads_of(model)
    name = rule or ("rejection" if any(request.do_sample for request in requests) else "greedy")
    factory = TrainedHeads(heads, resolve_tree(tree, heads))
    stepper = stepper_for(model, factory, requests, AcceptanceRule(name), compile=compile)
    return [result.new_ids for result in Decoding(stepper).finish()]


def begun(requests: list[Request], rule: AcceptanceRule, vocab: int) -> Sampler:
    target, device = Target(requests), torch.device("cpu")
    sampler = Sampler(Kind.of(target, rule, vocab), target, len(requests), TREE.max_depth, vocab, device)
    sampler.begin(target, Sequences(requests, None, device))
    return sampler


@pytest.mark.parametrize("candidates", [8, 1024])
def test_scores_are_those_of_the_processors(candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own options, and many logits are equal, as in bfloat16. 8 candidates are often too few."""
    monkeypatch.setattr(sampling, "CANDIDATES", candidates)
    model, names = shared_model("llama"), [name for name in OPTIONS if name != "top-k" or candidates > 8]
    names = [name for name in names if name != "all" or candidates > 8]  # else all tokens are sorted
    prompts = [random_ids(5 + row, seed=row) for row in range(len(names))]
    requests = requests_of(model, prompts, names)
    sampler = begun(requests, AcceptanceRule("rejection"), VOCAB)
    assert sampler.kind.candidates == min(candidates, VOCAB)
    ids = torch.randint(VOCAB, (len(names), TREE.num_nodes))
    logits, draft = (2 * torch.randn(*ids.shape, VOCAB)).mul(4).round() / 4, Draft(ids, Topology.of(TREE))
    scores = sampler._penalised(draft, logits) / sampler._number("temperature")
    shown, floor = sampler._shown(scores, sampler.kind.candidates)
    for row, node in product(range(len(names)), range(TREE.num_nodes)):
        path = [int(ids[row, n]) for n in TREE.paths[node].tolist() if n >= 0]
        text = torch.tensor([prompts[row] + path])
        processors: Any = requests[row].processors
        expected = processors(text, logits[row, node][None].clone())[0]
        known = torch.ones(VOCAB, dtype=torch.bool) if floor is None else scores[row, node] > floor[row, node]
        left = [some[some.isfinite() & known].sort().values for some in (shown[row, node], expected)]
        torch.testing.assert_close(*left, rtol=1e-6, atol=1e-6)  # float32 rounding; of equal scores any may be left
    assert (floor is None) == (candidates > VOCAB)
    assert floor is None or 0 < int((floor > -torch.inf).sum()) < floor.numel() / 2


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("tree", ["dynamic:30", TREE], ids=["dynamic", "static"])
def test_greedy_texts_with_a_penalty_equal_generate(tree: Any) -> None:
    """Of other texts in the same region nothing is seen."""
    model = shared_model("llama")
    Regions.of(model).clear()
    for penalty, seed in ((1.3, 0), (0.7, 1), (2.5, 2)):
        options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": None, "repetition_penalty": penalty}
        prompts = [random_ids(length, seed=length + seed) for length in (3, 11, 6)]
        requests = prepare(model, prompts, do_sample=False, **options)
        assert written(model, requests, tree) == [plain(model, prompt, **options) for prompt in prompts]
    assert len(Regions.of(model)) == 1


@pytest.mark.usefixtures("as_written")
def test_a_seed_gives_one_text_whatever_the_tree_and_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have different options, a greedy one among them. Too few candidates leave decisions to the host."""
    model, names = shared_model("llama"), [name for name in OPTIONS if name not in ("greedy, penalty", "greedy")]
    names = ["greedy, penalty", *names]
    prompts = [random_ids(5 + row, seed=row) for row in range(len(names))]
    requests = requests_of(model, prompts, names)

    def again() -> list[Request]:  # with generators that have drawn nothing
        return requests_of(model, prompts, names)

    together = written(model, requests)
    assert together[0] == plain(model, prompts[0], max_new_tokens=24, eos_token_id=None, repetition_penalty=1.4)
    assert together == [written(model, [request])[0] for request in again()]
    assert written(model, again(), Tree.chain(0)) == together
    finished = 0
    finish = Sampler.finish

    def counted(self: Sampler, *given: Any) -> Tensor:
        nonlocal finished
        finished += 1
        return finish(self, *given)

    monkeypatch.setattr(Sampler, "finish", counted)
    monkeypatch.setattr(sampling, "CANDIDATES", 16)
    assert written(model, again()) == together
    assert finished > 0
    assert len({tuple(text) for text in together}) == len(together)


def test_rows_without_a_text_never_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide the same in each step, so all steps would wait."""
    monkeypatch.setattr(sampling, "CANDIDATES", 2)
    requests = requests_of(shared_model("llama"), [random_ids(4)] * 30, ["top-p"] * 30)
    sampler = begun(requests, AcceptanceRule("rejection"), VOCAB)
    draft = Draft(torch.randint(VOCAB, (30, TREE.num_nodes)), Topology.of(TREE))
    logits, filled, living = torch.randn(30, TREE.num_nodes, VOCAB), torch.full((30,), 4), torch.ones(30)
    missing = sampler.decide(draft, logits, filled, alive=living).next_root == sampling.UNDECIDED
    assert missing.any()
    assert sampler.undecided
    sampler.undecided.zero_()
    root = sampler.decide(draft, logits, filled, alive=living.masked_fill(missing, 0)).next_root
    assert root[missing].eq(0).all()
    assert not sampler.undecided
    sampler.undecided.fill_(True)  # by a step that ran when all texts had ended
    sampler.begin(Target(requests), Sequences(requests, None, logits.device))
    assert not sampler.undecided, "other texts do not wait"


@pytest.mark.usefixtures("traced")
def test_other_values_compile_nothing() -> None:
    """Ten temperatures, top-p and min-p, with and without a penalty."""
    model, counters = tiny_model("llama", num_hidden_layers=1), torch._dynamo.utils.counters["stats"]
    before, texts = counters["unique_graphs"], set()
    for step in range(10):
        options = SAMPLED | {"temperature": 0.5 + 0.1 * step, "top_p": 0.9 - 0.05 * step, "min_p": 0.01 * step}
        options |= {"repetition_penalty": 1.3} if step % 2 else {}
        requests = prepare(model, [random_ids(4)], [7], max_new_tokens=4, eos_token_id=None, **options)
        texts.add(tuple(written(model, requests, Tree.chain(1))[0]))
    assert len(Regions.of(model)) == 1
    assert counters["unique_graphs"] - before == 1
    assert len(texts) > 3, "the values have an effect"


@pytest.mark.usefixtures("as_written")
def test_kinds_of_sampling_have_their_regions() -> None:
    """What needs no sorting, no draw or no penalty is left out of the code; values are no part of a kind."""
    model = tiny_model("llama", num_hidden_layers=1)
    kinds = [["top-p", "top-k", "all", "min-p"], ["temperature", "penalty below 1"], ["greedy, penalty"], ["greedy"]]
    for regions, names in enumerate(kinds, start=1):
        for name in names:
            written(model, requests_of(model, [random_ids(4)], [name], 3), Tree.chain(1))
            assert len(Regions.of(model)) == regions, name


def test_other_processors_that_look_alike() -> None:
    """They are compiled in, and their settings differ beyond the four digits of a tensor's repr."""
    keys = [settings_of(LogitsProcessorList([EtaLogitsWarper(epsilon)])) for epsilon in (0.00031, 0.00034, 0.00034)]
    assert keys[0] != keys[1] == keys[2]


def outcomes(tree: Tree, ids: Tensor, p: Tensor) -> dict[tuple[int, int], float]:
    """(node where the walk ends, next root) -> its probability, by enumeration; p [N, V], ids [N]."""
    chance = {0: 1.0}
    found = {}
    for node in range(tree.num_nodes):
        held = {}
        for child in range(1, tree.num_nodes):
            if int(tree.parent[child]) == node:
                held[int(ids[child])] = child
                chance[child] = chance[node] * float(p[node, ids[child]])
        for token in range(p.shape[1]):
            if token not in held:
                found[node, token] = chance[node] * float(p[node, token])
    return found


@pytest.mark.parametrize("rule", [AcceptanceRule("rejection"), AcceptanceRule("typical-sampled", 0.05, 0.3)])
def test_samples_follow_the_target(rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end and next root of 50,000 steps over one tree follow their exact probabilities."""
    tree = Tree.from_paths([[0], [1], [3], [0, 0], [0, 2], [1, 0], [3, 0], [0, 0, 0]])
    ids = torch.tensor([0, 1, 2, 4, 3, 5, 0, 1, 2])  # siblings differ
    logits, rows = 1.2 * torch.randn(tree.num_nodes, 6), 50_000
    request = prepare(shared_model("llama"), [[1]], do_sample=True, max_new_tokens=3)[0]
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)])
    request = request._replace(processors=processors)
    request = truncated(request, rule) if rule.kind.truncates else request
    exact = outcomes(tree, ids, Target([request]).scores_of(logits, logits.device).double().softmax(-1))
    assert abs(sum(exact.values()) - 1) < 1e-9
    target, device = Target([request]), torch.device("cpu")
    sampler = Sampler(Kind.of(target, rule, 6), target, rows, tree.max_depth, 6, device)
    sampler.numbers[:] = torch.tensor([1.0, 0.8, 0, 0.95, 0, 1])
    sampler.seeds.random_(2**32)
    filled = torch.arange(rows)
    reader = SimpleNamespace(depth_limit=lambda draft: None, cache=SimpleNamespace(filled=filled))
    state: Any = SimpleNamespace(reader=reader, alive=torch.ones(rows))
    draft, places = Draft(ids.expand(rows, -1), Topology.of(tree)), {one: index for index, one in enumerate(exact)}
    table = torch.full((tree.num_nodes, 6), -1)
    for (node, token), index in places.items():
        table[node, token] = index

    def p_value() -> float:
        accepted = sampler(draft, logits.expand(rows, -1, -1), state)
        counts = table[accepted.end, accepted.next_root].bincount(minlength=len(exact))
        return goodness_of_fit(counts, torch.tensor(list(exact.values()), dtype=torch.float64)).p_value

    assert p_value() > FALSE_ALARM
    # Steps that use one number at all depths are found out.
    monkeypatch.setattr(sampling, "gumbel", lambda seeds, position, vocab: gumbel(seeds, 0 * position, vocab))
    assert p_value() < FALSE_ALARM


def test_noise_is_independent_between_tokens_positions_and_seeds() -> None:
    """Each pair of neighbours falls into 256 squares of equal probability, for all bits that decide."""
    seeds = torch.stack([torch.arange(40), torch.full((40,), 2**32 - 1)], dim=1)  # as alike as seeds can be
    noise = gumbel(seeds, torch.arange(64).expand(40, -1), 128).double()
    u = 1 - torch.exp(-torch.exp(-noise))  # the uniform numbers that it was made of, 0 for the largest noise
    for scale in (1, 2**8):  # also the digits further down
        cell = (u * scale % 1 * 16).long().clamp_max(15)
        for dim, distance in product(range(3), (1, 2)):
            pairs = cell * 16 + cell.roll(distance, dim)
            counts = pairs.flatten().bincount(minlength=256)
            assert goodness_of_fit(counts, torch.full((256,), 1 / 256, dtype=torch.float64)).p_value > FALSE_ALARM
    biased = (cell * 16 + cell).flatten().bincount(minlength=256)
    assert goodness_of_fit(biased, torch.full((256,), 1 / 256, dtype=torch.float64)).p_value < FALSE_ALARM


def test_a_text_without_probabilities_beside_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "CANDIDATES", 2)
    requests = requests_of(shared_model("llama"), [random_ids(4)] * 30, ["top-p"] * 30)
    sampler = begun(requests, AcceptanceRule("rejection"), VOCAB)
    draft = Draft(torch.randint(VOCAB, (30, TREE.num_nodes)), Topology.of(TREE))
    logits = torch.randn(30, TREE.num_nodes, VOCAB)
    logits[:3] = torch.nan
    root = sampler.decide(draft, logits, torch.full((30,), 4)).next_root
    assert root[:3].eq(NO_TOKEN).all()
    assert (root == sampling.UNDECIDED).any()
    finished = sampler.finish(root)
    assert finished[:3].eq(NO_TOKEN).all()
    assert finished[3:].ge(0).all()


class Decisions:
    """The part of a step that decides."""

    def __init__(self, sampler: Sampler, *inputs: Any) -> None:
        self.sampler, self.inputs = sampler, inputs

    def step(self) -> Tensor:
        accepted = self.sampler.decide(*self.inputs)
        return torch.cat([accepted.path, accepted.length[:, None], accepted.next_root[:, None]], dim=1)


@pytest.mark.full  # machine code of these kernels takes 20 seconds
@pytest.mark.skipif(not _has_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("names", [["temperature", "all", "top-p", "greedy, penalty"], ["top-p"] * 20])
def test_machine_code_decides_as_written(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the decisions alone: with all options, and where the host has to decide on some tokens, which steps await."""
    monkeypatch.setattr(sampling, "CANDIDATES", 4)
    rows = len(names)
    requests = requests_of(shared_model("llama"), [random_ids(4, seed=row) for row in range(rows)], names)
    sampler = begun(requests, AcceptanceRule("rejection"), VOCAB)
    draft = Draft(torch.randint(VOCAB, (rows, TREE.num_nodes)), Topology.of(TREE))
    living = torch.ones(rows)
    living[-1] = 0
    decisions = Decisions(
        sampler, draft, 3 * torch.randn(rows, TREE.num_nodes, VOCAB), torch.full((rows,), 4), None, living
    )
    compiled = region.compiled(decisions.step, {"inplace_buffers": False})
    buffers = [tensor for tensor in sampler.buffers if tensor is not sampler.noise]
    for waits in (False, True, False) if sampler.may_miss else (False,):
        sampler.undecided.fill_(waits)
        before = [tensor.clone() for tensor in buffers]
        expected, after = decisions.step(), [tensor.clone() for tensor in buffers]
        assert all(map(torch.equal, before, after)) is waits, "else the root is seen from now on"
        for tensor, old in zip(buffers, before, strict=True):
            tensor.copy_(old)
        assert torch.equal(compiled(), expected)
        torch.testing.assert_close([tensor.clone() for tensor in buffers], after)  # scores differ by their rounding
        assert bool(sampler.undecided) is sampler.may_miss, "some token is undecided"


def test_rows_may_not_differ_in_what_is_compiled_in() -> None:
    model, prompt = shared_model("llama"), random_ids(4)
    requests = [prepare(model, [prompt], [1], max_new_tokens=3, typical_p=p, **SAMPLED)[0] for p in (0.5, 0.6)]
    with pytest.raises(RequestError, match="typical_p and epsilon_cutoff in all rows"):
        written(model, requests)
