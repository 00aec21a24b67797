"""decode/drafters/layouts.py: the most probable candidates, compared with a simple search, and lossless decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from decode.draft import Frontier
from decode.drafters.heads import HeadsDrafter
from decode.drafters.layouts import TOP, DynamicTree, _candidates, resolve_tree
from decode.generation import generate
from decode.topology import Topology, chosen_part
from medusa import Tree
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.inputs import HeadInputs
from tests.helpers import FORMS, plain, random_heads, random_ids, random_tree


def slow_choice(tree: Tree, log_p: torch.Tensor, nodes: int) -> list[int]:
    """Add the most probable node whose parent is taken, one at a time; log_p [K, R] of one row."""
    table, parent = log_p.tolist(), tree.parent.tolist()
    worth = [sum(table[d][r] for d, r in enumerate(path)) for path in [(), *tree.rank_paths]]
    taken = [0]
    while len(taken) < nodes:
        open_nodes = [n for n in range(1, tree.num_nodes) if n not in taken and parent[n] in taken]
        taken.append(max(open_nodes, key=lambda n: worth[n]))
    return sorted(taken)


@pytest.mark.parametrize(("nodes", "widths"), [*((n, [12] * 3) for n in (2, 3, 7, 12)), (30, [16] * 2)])
def test_the_most_probable_connected_nodes_are_chosen(nodes: int, widths: list[int]) -> None:
    """Compared with all paths over these guesses, no candidate that could win is missing."""
    everything = Tree.top_k(widths)
    dynamic = DynamicTree.over_heads(nodes, len(widths))
    top = dynamic.candidates.max_rank + 1
    for sharpness in (0.3, 2, 8):
        log_p = torch.randn(3, len(widths), 200, generator=torch.Generator().manual_seed(nodes))
        best = log_p.mul(sharpness).log_softmax(-1).topk(16, dim=-1).values
        chosen = dynamic.most_probable(dynamic.path_log_probs(best[:, :, :top]))
        for row, nodes_of_row in enumerate(chosen.tolist()):
            got = {dynamic.candidates.rank_paths[n - 1] for n in nodes_of_row if n}
            assert got == {everything.rank_paths[n - 1] for n in slow_choice(everything, best[row], nodes) if n}


def test_tied_nodes_keep_their_parents() -> None:
    """With confidences of exactly 1 and 0, scores tie or are minus infinity."""
    for nodes in (2, 3, 4, 9, 30):
        dynamic = DynamicTree.over_heads(nodes, 3)
        best = torch.full((1, 3, dynamic.candidates.max_rank + 1), -torch.inf)
        best[:, :, 0] = 0
        chosen = dynamic.most_probable(dynamic.path_log_probs(best))
        topology = chosen_part(dynamic.candidates, chosen)
        sure = topology.depth[0][dynamic.candidates.rank[chosen[0]] == 0]
        assert set(range(min(nodes, 4))) <= set(sure.tolist())
        assert set(dynamic.candidates.parent[chosen[0]].tolist()) <= set(chosen[0].tolist())


def test_candidates_are_few() -> None:
    assert _candidates(2, 5).rank_paths == [(0,)]
    assert set(_candidates(4, 2).rank_paths) == {(0,), (1,), (2,), (0, 0), (0, 1)}
    assert _candidates(256, 12).num_nodes <= 1024
    assert _candidates(256, 12).max_depth == 12


@pytest.mark.parametrize("seed", range(6))
def test_a_part_of_a_tree_is_the_tree_of_its_paths(seed: int) -> None:
    """A topology built from the paths of the chosen nodes must equal the selected part."""
    tree = random_tree(20, seed, max_rank=3)
    worth = torch.randn(4, tree.num_nodes, generator=torch.Generator().manual_seed(seed))
    for node in range(tree.num_nodes - 1, 0, -1):  # a parent is worth at least what its children are
        parent = int(tree.parent[node])
        worth[:, parent] = torch.maximum(worth[:, parent], worth[:, node])
    worth = worth - 1e-3 * tree.depth
    worth[:, 0] = 99
    chosen = worth.topk(9).indices.sort(-1).values
    part = chosen_part(tree, chosen)
    for row in range(4):
        paths = [tree.rank_paths[n - 1] for n in chosen[row].tolist() if n]
        expected = Topology.of(Tree.from_paths(paths))
        for name in ("parent", "depth", "ancestors"):
            assert torch.equal(getattr(part, name)[row], getattr(expected, name)[0]), name
        assert torch.equal(part.places()[row], expected.places()[0])
        deep, wide = expected.max_depth + 1, expected.max_children
        assert torch.equal(part.paths[row, :, :deep], expected.paths[0])
        assert part.paths[row, :, deep:].eq(-1).all()
        assert torch.equal(part.children()[row, :, :wide], expected.children()[0])
        assert part.children()[row, :, wide:].eq(-1).all()


def test_each_row_has_its_own_topology(llama: Any) -> None:
    heads = random_heads(llama, 3, lm_head="shared")
    drafter = HeadsDrafter(heads, Backbone(llama), DynamicTree.over_heads(8, 3))
    hidden = torch.randn(2, llama.config.hidden_size, generator=torch.Generator().manual_seed(0))
    draft = drafter.propose(Frontier(torch.tensor([3, 4]), hidden, [0, 1]))
    assert draft.ids.shape == (2, 8)
    assert draft.ids[:, 0].tolist() == [3, 4]
    assert not torch.equal(draft.topology.parent[0], draft.topology.parent[1])
    logits = heads(HeadInputs(hidden), Backbone(llama).lm_head)
    for row, node in itertools.product(range(2), range(1, 8)):
        head = int(draft.topology.depth[row, node]) - 1
        assert int(draft.ids[row, node]) in logits[head, row].topk(TOP).indices


@pytest.mark.parametrize("kind", ["medusa", "hydra", "recurrent", "markov", "eagle", "eagle-3, variants", "mtp"])
def test_non_finite_heads_do_not_change_the_text(llama: Any, kind: str) -> None:
    """NaN would win every comparison; still no node may be taken without its parent."""
    heads = random_heads(llama, 3, **({"lm_head": "shared"} | FORMS[kind]))
    broken: dict[str, Callable[[Any], list[torch.Tensor]]] = {"medusa": lambda heads: [heads.blocks[0].bias[1]]}
    broken["markov"] = lambda heads: [heads.out[1]]
    for name in ("eagle", "eagle-3, variants", "mtp"):  # all of them, so that everything they keep is non-finite, too
        broken[name] = lambda heads: list(heads.parameters())
    with torch.no_grad():
        for parameter in broken.get(kind, lambda heads: list(heads.stacks[1].parameters()))(heads):
            parameter.fill_(torch.nan)
    prompt = random_ids(6)
    out = generate(llama, heads, torch.tensor([prompt]), tree="dynamic:9", max_new_tokens=20)
    assert out[0, 6:].tolist() == plain(llama, prompt, max_new_tokens=20)


@pytest.mark.parametrize("temperatures", [(0.7,), (0.7, 1.0, 0.0), (1.0, -1.0, 1.0)])
def test_temperatures_that_do_not_fit_are_refused(temperatures: tuple[float, ...]) -> None:
    with pytest.raises(RequestError, match="give 3 numbers above 0"):
        DynamicTree.over_heads(8, 3, temperatures)


@pytest.mark.parametrize("spec", ["dynamic", "dynamic:", "dynamic:x", "dynamic:1", "dynamic:99999", "dynamics:8"])
def test_wrong_names_are_refused(llama: Any, spec: str) -> None:
    with pytest.raises(RequestError, match=spec.partition(":")[0]):
        resolve_tree(spec, random_heads(llama, 3))


def test_a_drawn_dynamic_tree_is_refused(llama: Any) -> None:
    """The distribution of a drawn node would depend on whether the node was probable enough to be kept."""
    with pytest.raises(RequestError, match="draft topk"):
        generate(
            llama, random_heads(llama, 3), torch.tensor([[1, 2]]), tree="dynamic:8", draft="sample", do_sample=True
        )
