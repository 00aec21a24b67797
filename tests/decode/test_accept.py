"""decode/accept.py: every rule compared with a simple walk; test_rejection.py has the distribution of sampling."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.accept import Acceptance, accept_greedy, accept_longest, accept_walk, at_end, pack
from decode.draft import Draft
from decode.rules import typical
from decode.topology import Topology, chosen_part
from medusa import Tree
from tests.helpers import random_tree


def accept_typical(draft: Draft, p: Tensor, epsilon: float, delta: float, room: Any = None) -> Acceptance:
    """Typical acceptance with a table of probabilities p [B, N, V], given row by row."""
    return accept_longest(draft, p.log().split(1), lambda scores: typical(scores.softmax(-1), epsilon, delta), room)


def children_of(tree: Tree | Topology, node: int) -> list[int]:
    return [child for child in range(1, len(tree.parent)) if int(tree.parent[child]) == node]


def slow_walk(tree: Topology, tokens: list[int], best: list[int], room: int, node: int = 0) -> list[int]:
    """Follow greedy decoding down the tree: the longest path on which every token is the next token."""
    lines = [
        slow_walk(tree, tokens, best, room, child)
        for child in children_of(tree, node)
        if tokens[child] == best[node] and int(tree.depth[child]) <= room
    ]
    return [node, *max(lines, key=len, default=[])]


def walked(
    draft: Draft, draw: Callable[[int, list[int]], int], room: Tensor | None = None, lazy: bool = True
) -> Acceptance:
    """`accept_walk` with a scripted target: `draw(row, path)` is the token after the path."""

    def target(rows: Tensor, nodes: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        return nodes, torch.arange(len(rows))  # "scores" that say where each row stands

    def decide(rows: Tensor, nodes: Tensor, index: Tensor) -> Tensor:
        paths = draft.topology.at(draft.topology.paths, rows, nodes[index]).tolist()
        pairs = zip(rows.tolist(), paths, strict=True)
        return torch.tensor([draw(row, [node for node in path if node >= 0]) for row, path in pairs])

    return accept_walk(draft, target, decide, room, lazy)


def random_draft(seed: int, rows: int = 3, vocab: int = 4) -> tuple[Draft, random.Random]:
    """A draft with few different tokens, including 0, so that much is accepted; siblings differ.

    With odd seeds every row has its own tree.
    """
    rng = random.Random(seed)
    tree = random_tree(rng.randint(0, 20), seed, max_rank=vocab - 1)
    topology = Topology.of(tree) if seed % 2 == 0 else chosen_part(tree, random_parts(tree, rows, rng))
    ids = []
    for row in range(rows):
        parent, tokens = topology.parent[0 if topology.is_shared else row], [rng.randrange(vocab)]
        for node in range(1, topology.num_nodes):
            siblings = {tokens[other] for other in range(1, node) if parent[other] == parent[node]}
            tokens.append(rng.choice([token for token in range(vocab) if token not in siblings]))
        ids.append(tokens)
    return Draft(torch.tensor(ids), topology), rng


def random_parts(tree: Tree, rows: int, rng: random.Random) -> Tensor:
    """Nodes [rows, N] of connected parts of `tree`, equally many in each row."""
    size, chosen = rng.randint(1, tree.num_nodes), []
    for _ in range(rows):
        nodes = [0]
        while len(nodes) < size:
            nodes.append(
                rng.choice([n for n in range(tree.num_nodes) if n not in nodes and int(tree.parent[n]) in nodes])
            )
        chosen.append(sorted(nodes))
    return torch.tensor(chosen)


def tree_of(draft: Draft, row: int) -> Topology:
    """The topology of one row, with tensors as those of a `Tree`."""
    topology, at = draft.topology, 0 if draft.topology.is_shared else row
    one = topology.parent[at], topology.depth[at], topology.ancestors[at], topology.paths[at]
    return Topology(*one, max_children=topology.max_children)


def line_of(accepted: Acceptance, row: int) -> list[int]:
    """The accepted nodes of a row; their padding must be -1."""
    length = int(accepted.length[row])
    assert accepted.path[row, length:].eq(-1).all()
    return accepted.path[row, :length].tolist()


def test_worked_example() -> None:
    """After root 7 the text continues 3, 0, 5. Node 3 holds the 0 and has no children."""
    tree = Tree.from_paths([[0], [1], [0, 0], [1, 0]])  # nodes 1, 2 under the root, 3 under 1, 4 under 2
    draft = Draft(torch.tensor([[7, 3, 4, 0, 0]]), Topology.of(tree))
    best = torch.tensor([[3, 0, 1, 5, 2]])  # what follows each node
    for accepted in (accept_greedy(draft, best), walked(draft, lambda row, path: int(best[row, path[-1]]))):
        assert accepted.path.tolist() == [[0, 1, 3]]
        assert accepted.length.tolist() == [3]
        assert accepted.next_root.tolist() == [5]


@pytest.mark.parametrize("with_room", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_greedy_and_walk_equal_the_slow_walk(seed: int, with_room: bool) -> None:
    draft, rng = random_draft(seed)
    rows, nodes = draft.ids.shape
    best = torch.tensor([[rng.randrange(4) for _ in range(nodes)] for _ in range(rows)])
    room = [rng.randint(0, 5) for _ in range(rows)] if with_room else [99] * rows
    limit = torch.tensor(room) if with_room else None
    visited: list[list[int]] = [[] for _ in range(rows)]

    def draw(row: int, path: list[int]) -> int:
        visited[row].append(path[-1])
        return int(best[row, path[-1]])

    greedy, walk = accept_greedy(draft, best, limit), walked(draft, draw, limit)
    whole = walked(draft, lambda row, path: int(best[row, path[-1]]), limit, lazy=False)
    hidden = torch.randn(rows, nodes, 3)
    for row in range(rows):
        expected = slow_walk(tree_of(draft, row), draft.ids[row].tolist(), best[row].tolist(), room[row])
        assert line_of(greedy, row) == expected
        assert line_of(walk, row) == line_of(whole, row) == expected
        assert int(greedy.next_root[row]) == int(walk.next_root[row]) == int(best[row, expected[-1]])
        assert int(whole.next_root[row]) == int(best[row, expected[-1]])
        assert torch.equal(at_end(hidden, greedy)[row], hidden[row, expected[-1]])
        length, root, *ids = pack(draft, greedy)[row].tolist()
        assert (length, root, ids[:length]) == (
            len(expected),
            best[row, expected[-1]],
            draft.ids[row, expected].tolist(),
        )
        assert visited[row] == expected, "one draw per node of the path, in order: a seed then gives the plain text"


def brute_typical(tree: Topology, tokens: list[int], p: Tensor, epsilon: float, delta: float, room: int) -> list[int]:
    """Enumerate and sort all paths: the longest path whose tokens all pass, then the most probable."""
    threshold = [min(epsilon, delta * float(torch.exp(torch.special.xlogy(q, q).sum()))) for q in p.double()]
    found = []
    for line in tree.paths.tolist():
        nodes = [node for node in line if node >= 0]
        steps = list(itertools.pairwise(nodes))
        passes = all(
            float(p[above, tokens[node]]) > threshold[above] or tokens[node] == int(p[above].argmax())
            for above, node in steps
        )
        if passes and len(steps) <= room:
            found.append((len(nodes), sum(float(p[a, tokens[n]].double().log()) for a, n in steps), nodes))
    return max(found)[2]


@pytest.mark.parametrize("seed", range(30))
def test_typical_is_the_best_of_all_paths(seed: int) -> None:
    draft, rng = random_draft(seed)
    rows = len(draft.ids)
    p = (torch.randn(*draft.ids.shape, 4, generator=torch.Generator().manual_seed(seed)) * 1.5).softmax(-1)
    epsilon, delta = rng.choice([(0.09, 0.3), (0.3, 0.09), (0.5, 1.0), (0.0, 0.0), (1.0, 1.0)])
    room = [rng.randint(0, 5) for _ in range(rows)]
    accepted = accept_typical(draft, p, epsilon, delta, torch.tensor(room))
    greedy = accept_greedy(draft, p.argmax(-1), torch.tensor(room))
    for row in range(rows):
        nodes = line_of(accepted, row)
        assert nodes == brute_typical(tree_of(draft, row), draft.ids[row].tolist(), p[row], epsilon, delta, room[row])
        assert int(accepted.next_root[row]) == int(p[row, nodes[-1]].argmax())
        assert int(accepted.length[row]) >= int(greedy.length[row]), "typical is never shorter than greedy"


@pytest.mark.parametrize("delta", [0.3, 1.0])
def test_the_most_probable_token_always_passes(delta: float) -> None:
    """exp(-H) <= max p, with equality for uniform p, where `>` and rounding would give random results."""
    draft = Draft(torch.tensor([[1, 0]]), Topology.of(Tree.chain(1)))
    for p in (torch.full((5,), 0.2), torch.tensor([1.0, 0, 0, 0, 0]), torch.tensor([0.5, 0.5, 0, 0, 0])):
        accepted = accept_typical(draft, p.expand(1, 2, -1), 1.0, delta)
        assert accepted.length.tolist() == [2]


def test_typical_with_an_impossible_token() -> None:
    """A token of probability 0 never passes, and its logarithm causes no error."""
    draft = Draft(torch.tensor([[1, 2]]), Topology.of(Tree.chain(1)))
    accepted = accept_typical(draft, torch.tensor([0.6, 0.4, 0.0]).expand(1, 2, -1), 0.0, 0.0)
    assert (accepted.length.tolist(), accepted.next_root.tolist()) == ([1], [0])
