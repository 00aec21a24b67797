"""Drafts with a probability threshold: which nodes are kept, and that the text is the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from decode import generate
from decode.draft import Draft, Frontier
from decode.drafters.layouts import STEEPNESS, DynamicTree, resolve_tree, with_shortlist
from decode.drafters.levelwise import PathDrafter
from decode.drafters.trained_heads import heads_drafter
from decode.settings import DecodingOptions, Settings
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from tests.decode.drafters.test_paths import path_to
from tests.helpers import RESIDUAL, VOCAB, random_heads

NODES, HEADS = 14, 3
TEMPERATURES = (0.5, 0.5, 0.5)


def heads_for(model: Any, kind: str, scale: float = 1.0) -> MedusaHeads:
    heads = random_heads(model, HEADS, kind=kind, lm_head="shared", block="mlp")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale * parameter.shape[-1] ** -0.5)
    return heads


def drafted(model: Any, heads: MedusaHeads, least: float, rows: list[int]) -> Draft:
    tree = DynamicTree(NODES, DynamicTree.over_heads(NODES, HEADS).candidates, TEMPERATURES, least)
    tree = with_shortlist(tree, VOCAB)  # for heads that estimate the probability of all other tokens together
    hidden = torch.randn(5, Backbone(model).hidden_size, generator=torch.Generator().manual_seed(1))
    frontier = Frontier(torch.arange(3, 8)[rows], hidden[rows], rows)
    with torch.no_grad():
        return heads_drafter(heads, Backbone(model), tree).propose(frontier)


def paths_of(draft: Draft, row: int) -> set[tuple[int, ...]]:
    return {tuple(path_to(draft, row, node)) for node in range(draft.topology.num_nodes)}


@torch.no_grad()
def worths(model: Any, heads: MedusaHeads, draft: Draft, row: int, number: int) -> dict[tuple[int, ...], float]:
    """The score of each path of a draft by definition: the product of the heads' tempered probabilities."""
    backbone = Backbone(model)
    hidden = torch.randn(5, backbone.hidden_size, generator=torch.Generator().manual_seed(1))[number]
    found = {}
    for path in paths_of(draft, row):
        padded = torch.tensor([list(path) + [0] * HEADS])[:, :HEADS]
        logits = heads(HeadInputs(hidden[None], backbone.embed(padded)), backbone.lm_head)[:, 0]
        log_p = (logits / torch.tensor(TEMPERATURES)[:, None]).log_softmax(-1)
        found[path] = sum(float(log_p[depth, token]) for depth, token in enumerate(path[1:]))
    return found


@pytest.mark.parametrize("row", range(5))
@pytest.mark.parametrize("kind", RESIDUAL)
def test_nodes_above_the_threshold_are_kept(llama: Any, kind: str, row: int) -> None:
    heads = heads_for(llama, kind)
    whole = drafted(llama, heads, 0.0, [row])
    known = worths(llama, heads, whole, 0, row)
    ordered = sorted(known.values(), reverse=True)
    for place in (1, NODES // 2, NODES - 1):
        least = math.exp((ordered[place] + ordered[place - 1]) / 2) if place > 1 else math.exp(ordered[1] + 0.01)
        kept = {path for path, worth in known.items() if worth - STEEPNESS * len(path[1:]) >= math.log(least)}
        assert paths_of(drafted(llama, heads, least, [row]), 0) == kept
    assert paths_of(drafted(llama, heads, 1.0, [row]), 0) == {(3 + row,)}, "nothing is certain: the root alone"


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
def test_a_batch_has_the_nodes_of_its_largest_row(llama: Any, kind: str) -> None:
    heads, rows = heads_for(llama, kind), [0, 1, 2, 3, 4]
    known = [worths(llama, heads, drafted(llama, heads, 0.0, [row]), 0, row) for row in rows]
    least = math.exp(sorted(worth for found in known for worth in found.values())[len(rows) * NODES // 2])
    alone = [drafted(llama, heads, least, [row]) for row in rows]
    sizes = [draft.ids.shape[1] for draft in alone]
    assert len(set(sizes)) > 1, "all rows are equally sure: no power"
    together = drafted(llama, heads, least, rows)
    assert together.ids.shape[1] == max(sizes)
    for row, draft in zip(rows, alone, strict=True):
        assert paths_of(draft, 0) <= paths_of(together, row)


def test_heads_below_the_last_level_are_not_run(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, seen = heads_for(llama, "hydra"), []
    step = PathDrafter.step

    def watched(self: PathDrafter, head: int, state: tuple[torch.Tensor, ...], *rest: Any) -> Any:
        seen.append((head, state[0].shape[1]))
        return step(self, head, state, *rest)

    monkeypatch.setattr(PathDrafter, "step", watched)
    draft = drafted(llama, heads, 0.0, [0])
    assert [head for head, _ in seen] == [0, 1, 2]
    best = max(worth for path, worth in worths(llama, heads, draft, 0, 0).items() if len(path) == 2)
    seen.clear()
    drafted(llama, heads, math.exp(best) + 0.01, [0])
    assert [head for head, _ in seen] == [0], "not the best guess of the first head is believed in"
    seen.clear()
    drafted(llama, heads, math.exp(best) - 0.01, [0])
    assert seen[:2] == [(0, 1), (1, 1)], "one guess is, and only what follows it is asked for"


def test_unsupported_thresholds_are_rejected(llama: Any) -> None:
    heads, ids = heads_for(llama, "hydra"), torch.tensor([[1, 2]])
    with pytest.raises(RequestError, match="stop_drafting works only with a dynamic tree; use tree dynamic:N"):
        resolve_tree("chain", heads, 0.1)
    with pytest.raises(RequestError, match=r"stop_drafting is 1.5; it must be between 0 and 1"):
        Settings(stop_drafting=1.5)
    with pytest.raises(RequestError, match="use draft topk"):
        DecodingOptions(draft="sample", stop_drafting=0.1).rule_for(True)
    with pytest.raises(RequestError, match="use typical-sampled"):
        DecodingOptions(acceptance="typical", stop_drafting=0.1).rule_for(True)
    with pytest.raises(RequestError, match="compile needs steps of one shape"):
        generate(llama, heads, ids, tree="dynamic:8", stop_drafting=0.1, compile=True, max_new_tokens=4)
