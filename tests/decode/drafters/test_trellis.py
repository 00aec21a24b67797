"""decode/drafters/trellis.py: look-ups draft what the heads say on each path, computed path by path."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.bench.calibration.calibrate import calibrate
from decode.bench.calibration.stored import Calibration, store, stored
from decode.bench.methods import plain_method
from decode.draft import Frontier
from decode.drafters import levelwise
from decode.drafters.base import DrafterFactory
from decode.drafters.layouts import DynamicTree, Layout, with_shortlist
from decode.drafters.levelwise import PathDrafter
from decode.drafters.trained_heads import heads_drafter
from decode.drafters.trellis import TrellisDrafter
from decode.settings import Settings
from decode.target import Target
from medusa import Tree
from medusa.backbone import Backbone
from medusa.heads.inputs import HeadInputs
from medusa.heads.markov import MarkovHeads
from medusa.tree import usual_shortlist
from tests.decode.drafters.test_paths import best_paths, path_to, require_drawn
from tests.helpers import VOCAB, random_heads, random_ids, random_tree

ROWS, K = 3, 3
FORMS: dict[str, dict[str, Any]] = {
    "shared": {"lm_head": "shared", "block": "mlp", "num_layers": 2},
    "own": {"lm_head": "own"},
    "vocabulary": {"lm_head": "shared", "vocabulary": 40},
    "own vocabulary": {"lm_head": "own", "vocabulary": 40, "rank": 5},
}


def markov(model: Any, num_heads: int = K, **settings: Any) -> MarkovHeads:
    heads = random_heads(model, num_heads, kind="markov", **settings).double()
    assert isinstance(heads, MarkovHeads)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.mul_(0.5)  # confidences below e^-50 count as equal
    if heads.vocabulary is not None:
        heads.vocabulary = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[: len(heads.vocabulary)]
    return heads


def frontier(model: Any, rows: int = ROWS) -> Frontier:
    hidden = torch.randn(rows, Backbone(model).hidden_size, generator=torch.Generator().manual_seed(1))
    return Frontier(torch.arange(3, 3 + rows), hidden.double(), list(range(rows)))


@pytest.fixture(scope="module")
def double(llama: Any) -> Any:
    return copy.deepcopy(llama).double()


@torch.no_grad()
def logits_after(model: Any, heads: MarkovHeads, hidden: Tensor, path: list[int]) -> Tensor:
    """The logits of the head after the tokens of `path`, root first, over all tokens, [VOCAB]."""
    backbone, lm_head = Backbone(model), Backbone(model).head_weight
    padded = torch.tensor([path + [0] * (heads.config.num_heads - len(path))])
    features = heads.features(HeadInputs(hidden[None], backbone.embed(padded)))[len(path) - 1, 0]
    return said(heads, features, len(path) - 1, lm_head)


@torch.no_grad()
def independent_logits(model: Any, heads: MarkovHeads, start: Frontier, row: int, head: int) -> Tensor:
    """The logits of the independent part of a head over all tokens, [VOCAB]: those without a path term."""
    out, heads.out.data = heads.out.data, torch.zeros_like(heads.out)
    found = logits_after(model, heads, start.hidden[row], [int(start.root[row]), *[0] * head])
    heads.out.data = out
    return found


def said(heads: MarkovHeads, features: Tensor, head: int, lm_head: Tensor) -> Tensor:
    ids = torch.arange(VOCAB) if heads.vocabulary is None else heads.vocabulary
    logits = lm_head[ids] @ features if heads.lm_heads is None else features @ heads.lm_heads[head]
    return torch.full((VOCAB,), -torch.inf, dtype=logits.dtype).index_put((ids,), logits)


def candidates(model: Any, heads: MarkovHeads, start: Frontier, row: int, shortlist: int) -> list[list[int]]:
    """The candidates of each head: its most probable tokens without a path, except that the heads know the root."""
    logits = [independent_logits(model, heads, start, row, head) for head in range(heads.config.num_heads)]
    return [found.topk(shortlist).indices.tolist() for found in logits]


@torch.no_grad()
def test_with_all_tokens_the_trellis_is_the_slow_form(double: Any) -> None:
    """The oracle reads the LM head for every node. In float64, trees are equal."""
    start = frontier(double)
    trees: list[Layout] = [*(random_tree(14, seed, max_depth=K) for seed in range(3)), Tree.chain(1), Tree.chain(2)]
    trees += [DynamicTree.over_heads(nodes, K, (0.7, 1.0, 1.5)) for nodes in (2, 9, 40)]
    for settings in FORMS.values():
        heads = markov(double, **settings)
        for tree in trees:
            drafters = [
                make(heads, Backbone(double), with_shortlist(tree, VOCAB)) for make in (TrellisDrafter, PathDrafter)
            ]
            fast, slow = (drafter.propose(start) for drafter in drafters)
            assert torch.equal(fast.ids, slow.ids)
            assert torch.equal(fast.topology.parent, slow.topology.parent)


@torch.no_grad()
def test_heads_in_float32_add_to_logits_in_bfloat16_in_float32(double: Any) -> None:
    """Rounded to bfloat16, different sums would be equal."""
    model, heads = copy.deepcopy(double).bfloat16(), markov(double, **FORMS["shared"]).float()
    start = frontier(double)
    start = start._replace(hidden=start.hidden.bfloat16())
    drafter = TrellisDrafter(heads, Backbone(model), with_shortlist(Tree.chain(K), 8))
    tables = drafter.begin(start).tables
    assert tables.dtype == torch.float32
    assert not torch.equal(tables, tables.bfloat16().float())


STATIC = {  # trees for five heads, with the number of candidates that is asked for
    "as deep as the heads": ([[0] * depth for depth in range(1, 6)] + [[1], [1, 2], [1, 2, 1], [1, 2, 1, 3]], 8),
    "shallower than the heads": ([[0], [2], [0, 1], [2, 0], [2, 3]], 8),
    "ranks beyond the usual candidates": ([[0], [17], [0, 16], [17, 19], [17, 19, 18]], None),
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_a_static_tree_holds_the_best_candidates_of_each_path(double: Any, form: str) -> None:
    """The usual number of candidates is 16; a tree with greater ranks gets as many as it needs."""
    heads, start, row = markov(double, 5, **FORMS[form]), frontier(double, 2), 1
    for paths, shortlist in STATIC.values():
        tree = Tree.from_paths(paths)
        draft = heads_drafter(heads, Backbone(double), with_shortlist(tree, shortlist)).propose(start)
        allowed = candidates(double, heads, start, row, shortlist or tree.max_rank + 1)
        for node in range(1, tree.num_nodes):
            *path, token = path_to(draft, row, node)
            logits = logits_after(double, heads, start.hidden[row], path)
            best = sorted(allowed[len(path) - 1], key=lambda t, logits=logits: -float(logits[t]))
            assert token == best[int(tree.rank[node])]


@torch.no_grad()
@pytest.mark.parametrize("nodes", [2, 6, 15])
@pytest.mark.parametrize("form", FORMS)
def test_a_dynamic_tree_holds_the_most_probable_paths(
    double: Any, form: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a search over all paths of candidates, which share what they hold in the independent part."""
    monkeypatch.setattr(levelwise, "width_of", lambda tree: tree.num_nodes)
    heads, start, temperatures = markov(double, **FORMS[form]), frontier(double), (0.7, 1.0, 1.5)
    tree = with_shortlist(DynamicTree.over_heads(nodes, K, temperatures), 15)
    draft = heads_drafter(heads, Backbone(double), tree).propose(start)
    for row in range(ROWS):
        allowed = candidates(double, heads, start, row, 15)

        def shares(path: list[int], row: int = row, allowed: list[list[int]] = allowed) -> Tensor:
            head, only = len(path) - 1, torch.full((VOCAB,), -torch.inf, dtype=torch.float64)
            logits = logits_after(double, heads, start.hidden[row], path)
            alone = independent_logits(double, heads, start, row, head) if head else logits
            only[allowed[head]] = logits[allowed[head]]
            held = (alone / temperatures[head]).softmax(-1)[allowed[head]].sum().log()
            return held + (only / temperatures[head]).log_softmax(-1)

        found = {tuple(path_to(draft, row, node)) for node in range(nodes)}
        assert found == best_paths(shares, int(start.root[row]), nodes, K)


@torch.no_grad()
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("form", ["own", "vocabulary"])
def test_drawn_tokens_are_candidates_and_follow_the_stored_distributions(double: Any, form: str, copies: bool) -> None:
    """q is the distribution on the path over the candidates, and zero elsewhere; first children follow it."""
    heads, one, tree = markov(double, **FORMS[form]), frontier(double, 1), with_shortlist(Tree.top_k([2, 2, 1]), 5)
    allowed = candidates(double, heads, one, 0, 5)

    def q_after(path: list[int]) -> Tensor:
        logits, kept = logits_after(double, heads, one.hidden[0], path), torch.tensor(allowed[len(path) - 1])
        return torch.zeros(VOCAB).index_put((kept,), (logits[kept] / 0.8).softmax(-1).float())

    def make(target: Target) -> TrellisDrafter:
        return TrellisDrafter(heads, Backbone(double), tree, target)

    require_drawn(make, one, copies, q_after, temperature=0.8, top_k=0)


def test_larger_trees_have_more_candidates(double: Any) -> None:
    heads, backbone = markov(double, **FORMS["shared"]), Backbone(double)
    for nodes, expected in ((8, 16), (32, 16), (33, 32), (64, 32)):
        assert usual_shortlist(nodes) == expected
        assert TrellisDrafter(heads, backbone, DynamicTree.over_heads(nodes, K)).shortlist == expected
    assert TrellisDrafter(heads, backbone, Tree.chain(K)).shortlist == 16


Timed = Callable[[int | None], float]  # seconds of a step, or tokens per step, by the number of candidates


def calibrated(model: Any, patch: pytest.MonkeyPatch, seconds: Timed, taus: Timed, *sizes: int) -> Calibration:
    """Calibrate the tree of `markov` heads as if steps took so many `seconds` and wrote so many tokens (`taus`)."""
    calibrating = "decode.bench.calibration.calibrate"
    patch.setattr(f"{calibrating}.MIN_STEPS", 1)

    def of_tree(figure: Timed, way: Any, otherwise: float) -> float:
        return otherwise if isinstance(way, DrafterFactory) else figure(way.candidates.shortlist)

    patch.setattr(f"{calibrating}.time_steps", lambda *args: [of_tree(seconds, way, 1000.0) for way in args[3]])
    patch.setattr(f"{calibrating}.decoded_tau", lambda *args: of_tree(taus, args[3], 1.0))
    settings, prompts = Settings(max_new_tokens=12), [random_ids(5, seed=seed) for seed in range(4)]
    texts = [(result.input_ids, result.new_ids) for result in plain_method(model, settings)(prompts)]
    heads = random_heads(model, K, kind="markov", lm_head="shared")
    return calibrate(model, heads, texts, settings, sizes=sizes)


@pytest.mark.parametrize(("gain", "chosen"), [(1.005, 8), (1.02, 64)])
def test_more_candidates_must_be_clearly_faster(
    llama: Any, gain: float, chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small differences are errors of timing, and a smaller number is right on more machines."""
    found = calibrated(llama, monkeypatch, lambda size: 1 / gain if size == 64 else 1.0, lambda size: 2.0, 4)
    assert found.shortlist == chosen


@pytest.mark.parametrize("fastest", [8, 64])
def test_a_calibration_chooses_and_keeps_the_number_of_candidates(
    llama: Any, fastest: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All trees accept less than with the fastest number of candidates."""

    def seconds(size: int | None) -> float:
        return 1.0 if size in (fastest, None) else 100.0

    found = calibrated(llama, monkeypatch, seconds, lambda size: 2.0 if size == fastest else 1.9, 1, 4)
    assert found.shortlist == found.tree.candidates.shortlist == fastest
    assert found.best.dynamic, "the prediction of a dynamic tree is what decoding with it showed"
    assert found.predicted_tau(found.tree) == pytest.approx(2.0)
    monkeypatch.setattr("decode.bench.calibration.stored.MIN_STEPS", 1)
    again = stored([store([tmp_path / "calibration.json"], found)], found.holds_for)
    assert again is not None
    assert again.tree.candidates.shortlist == fastest
