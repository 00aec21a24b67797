"""Steps of Markov heads as they are recorded, and as they are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch

from decode import steps
from decode.bench.report.plots import INK
from decode.bench.report.trellis_plot import STRONG, line_width, trellis_figure
from decode.bench.trellis_steps import TrellisStep, trellis_steps
from decode.drafters.layouts import DynamicTree, with_shortlist
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from tests.helpers import random_heads, random_ids, random_tree, shared_model

K, M = 3, 6
TREES = {"dynamic": DynamicTree.over_heads(9, K, (0.7, 1.0, 1.5)), "static": random_tree(9, max_rank=4, max_depth=K)}
PROMPT = torch.tensor([random_ids(7)])
Paths = Counter[tuple[str, ...]]
Cell = tuple[int, int]  # column and row


def heads_of(kind: str) -> Any:
    return random_heads(shared_model(), K, kind=kind, block="mlp")


@pytest.fixture(scope="module", params=list(TREES))
def recorded(request: pytest.FixtureRequest) -> tuple[Any, list[TrellisStep]]:
    tree = with_shortlist(TREES[request.param], M)
    found = trellis_steps(shared_model(), heads_of("markov"), PROMPT, tree=tree, max_new_tokens=40)
    return tree, list(found)


def test_the_steps_are_those_of_ordinary_decoding(recorded: tuple[Any, list[TrellisStep]]) -> None:
    tree, found = recorded
    text = PROMPT[0].tolist()
    told = steps(shared_model(), heads_of("markov"), PROMPT, tree=tree, max_new_tokens=40, keep_drafts=True)
    for step, ordinary in zip(found, (one for one in told if one.drafts), strict=True):
        assert step.draft == ordinary.drafts[0]
        assert step.text == text
        text += ordinary.ids[0]


@torch.no_grad()
def test_tables_are_what_the_heads_say_after_each_pair_of_tokens(recorded: tuple[Any, list[TrellisStep]]) -> None:
    """The heads run on one path at a time; a dynamic tree divides their logits by its temperatures."""
    model, heads, (tree, found) = shared_model(), heads_of("markov"), recorded
    backbone, step = Backbone(model), found[1]
    hidden = model(torch.tensor([step.text]), output_hidden_states=True).hidden_states[-1][:, -1]
    scale = tree.temperatures if isinstance(tree, DynamicTree) else (1.0,) * K

    def shares(path: list[int]) -> torch.Tensor:
        head = len(path) - 1
        padded = torch.tensor([path + [0] * (K - len(path))])
        features = heads.features(HeadInputs(hidden, backbone.embed(padded)))[head, 0]
        return ((features @ heads.lm_heads[head])[step.candidates[head]] / scale[head]).softmax(-1)

    root = step.draft.ids[0]
    torch.testing.assert_close(step.first, shares([root]), rtol=1e-4, atol=1e-5)
    for head in range(1, K):
        for place, token in enumerate(step.candidates[head - 1]):
            path = [root, *[5] * (head - 1), token]  # tokens before the last one change nothing
            torch.testing.assert_close(step.tables[head - 1, place], shares(path), rtol=1e-4, atol=1e-5)


def test_the_drawn_tree_is_the_drafters_tree(recorded: tuple[Any, list[TrellisStep]]) -> None:
    """Texts and lines are read back from the figure: all paths of the tree, and which of them are accepted."""
    longest = max(recorded[1], key=lambda step: len(step.draft.accepted))
    assert len(longest.draft.accepted) > 1
    for step in (longest, recorded[1][0]):
        above, below = trellis_figure(step, "<{}>".format).axes
        labels, lines = read(below)
        parents = {end: start for start, end, color, _ in lines if color == INK["medusa"]}
        thick = {end for _, end, _, width in lines if width == line_width(accepted=True)}
        assert all_paths(labels, parents, labels) == expected(step, range(len(step.draft.ids)))
        assert all_paths(labels, parents, thick) == expected(step, step.draft.accepted[1:])
        check_trellis(above, step)


def test_any_text_fits_into_its_box() -> None:
    """A dollar sign begins no formula, and a long token is cut."""
    step = next(trellis_steps(shared_model(), heads_of("markov"), PROMPT, tree=TREES["static"], max_new_tokens=9))
    figure = trellis_figure(step, lambda token: "$\\frac$ and more")
    figure.draw_without_rendering()
    assert {text.get_text() for text in figure.axes[1].texts} >= {"$\\frac$ a…", "root"}


def check_trellis(above: Axes, step: TrellisStep) -> None:
    """The upper picture has all candidates, the strong entries of all tables, and the lines of the tree."""
    labels, lines = read(above)
    root = {(0, 0): f"<{step.draft.ids[0]}>"}
    cells = {(k, row): f"<{token}>" for k, ids in enumerate(step.candidates, 1) for row, token in enumerate(ids)}
    assert labels == root | cells
    tables = [step.first[None], *step.tables]
    strong = {((k, i), (k + 1, j)) for k, table in enumerate(tables) for i, j in (table >= STRONG).nonzero().tolist()}
    assert {(start, end) for start, end, color, _ in lines if color == INK["line"]} == strong
    drawn = {(start[0], labels[start], labels[end]) for start, end, color, _ in lines if color == INK["medusa"]}
    assert drawn == {(len(path) - 2, *path[-2:]) for path in expected(step, range(1, len(step.draft.ids)))}


def read(axes: Axes) -> tuple[dict[Cell, str], list[tuple[Cell, Cell, str, float]]]:
    """The texts in brackets by column and row, and the lines as (start, end, colour, width)."""
    texts = [(text.get_text(), text.get_position()) for text in axes.texts]
    labels = {(round(x), round(y)): text for text, (x, y) in texts if text.startswith("<")}
    lines = []
    for patch in axes.patches:
        if isinstance(patch, PathPatch):
            (left, top), (right, bottom) = patch.get_path().vertices[[0, -1]]
            color = to_hex(patch.get_edgecolor())
            lines.append(((round(left), round(top)), (round(right), round(bottom)), color, patch.get_linewidth()))
    return labels, lines


def all_paths(labels: dict[Cell, str], parents: dict[Cell, Cell], cells: Iterable[Cell]) -> Paths:
    """The paths of texts from the root to `cells`."""
    paths: Paths = Counter()
    for cell in cells:
        path = [cell]
        while path[0] in parents:
            path.insert(0, parents[path[0]])
        assert path[0] == (0, 0)
        paths[tuple(labels[one] for one in path)] += 1
    return paths


def expected(step: TrellisStep, nodes: Iterable[int]) -> Paths:
    """The paths of texts from the root to `nodes` of the draft."""
    paths: Paths = Counter()
    for node in nodes:
        path = [node]
        while path[0]:
            path.insert(0, step.draft.parents[path[0]])
        paths[tuple(f"<{step.draft.ids[one]}>" for one in path)] += 1
    return paths


@pytest.mark.parametrize(
    ("kind", "rows", "told"), [("medusa", 1, "of kind medusa; only those of kind markov"), ("markov", 2, "2 prompts")]
)
def test_other_heads_and_batches_are_refused(kind: str, rows: int, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        next(trellis_steps(shared_model(), heads_of(kind), PROMPT.expand(rows, -1), max_new_tokens=4))


@pytest.mark.parametrize("tree", [Tree.from_paths([]), DynamicTree(1, Tree.from_paths([]))], ids=["static", "dynamic"])
def test_a_root_alone_is_refused(tree: Tree | DynamicTree) -> None:
    with pytest.raises(RequestError, match="a root alone"):
        next(trellis_steps(shared_model(), heads_of("markov"), PROMPT, tree=tree, acceptance="typical"))
