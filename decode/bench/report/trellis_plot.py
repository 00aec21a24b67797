"""Draws one step of Markov heads: each head's candidates, the tables of pairs, the tree, and the accepted path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from decode.bench.report.plots import INK
from decode.bench.trellis_steps import TrellisStep

STRONG = 0.2  # less probable entries of the tables are not drawn
ROW, COLUMN = 0.25, 1.12  # inches from one row of tokens to the next, and from one column to the next
BOX = (0.58, 0.78)  # width and height of a token's box, in columns and rows
SIZE = 9.5  # points of a token's text
LONGEST = 10  # characters of a token that are shown; more would not fit into its box
Cell = tuple[int, int]  # column and row


class Style(NamedTuple):
    """How a token is drawn: the colours of its box, of the edge around it, and of its text."""

    face: str | tuple[str, float]  # a colour, also with its opacity
    edge: str
    text: str


CANDIDATE = Style(INK["paper"], "none", INK["faint"])
ROOT = Style(INK["amber"], INK["amber"], INK["ink"])
GUESS = Style((INK["medusa"], 0.13), INK["medusa"], INK["ink"])
ACCEPTED = Style(INK["medusa"], INK["medusa"], INK["paper"])


def trellis_figure(step: TrellisStep, name_of: Callable[[int], str]) -> Figure:
    """Draw the trellis of a step, and below it the tree that grew from it; `name_of` gives the text of a token id."""
    rows, depths = step.draft.grid
    heights = [len(step.candidates[0]) + 2, max(rows) + 3]
    size = (COLUMN * (len(step.candidates) + 1), ROW * (sum(heights) + 2))
    figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0, h_pad=0.03, hspace=0))
    above, below = figure.subplots(2, 1, height_ratios=heights)
    for axes, height in zip((above, below), heights, strict=True):
        axes.set(xlim=(-0.5, len(step.candidates) + 0.5), ylim=(height - 1.5, -1.5))
        axes.axis("off")
        for column in range(len(step.candidates) + 1):
            label = f"head {column}" if column else "root"
            axes.text(column, -1, label, ha="center", va="center", fontsize=SIZE, color=INK["faint"])
    draw_trellis(above, step, name_of)
    draw_draft(below, step, list(zip(depths, rows, strict=True)), name_of)
    above.set_title(f"The trellis: {len(step.candidates[0])} candidates of each head", loc="left", fontsize=11)
    below.set_title(
        f"The tree: {len(rows) - 1} guesses, {len(step.draft.accepted) - 1} accepted", loc="left", fontsize=11
    )
    figure.legend(handles=legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=SIZE)
    return figure


def draw_trellis(axes: Axes, step: TrellisStep, name_of: Callable[[int], str]) -> None:
    """Draw all candidates, the strong entries of the tables in grey, and the paths of the tree over them."""
    for head, table in enumerate([step.first[None], *step.tables]):
        for above, below in (table >= STRONG).nonzero().tolist():
            width = 0.4 + 3 * float(table[above, below])
            line(axes, (head, above), (head + 1, below), INK["line"], width, zorder=0)
    for column, ids in enumerate(step.candidates, 1):
        for row, token in enumerate(ids):
            box(axes, (column, row), name_of(token), CANDIDATE)
    draw_draft(axes, step, step.places, name_of)


def draw_draft(axes: Axes, step: TrellisStep, cells: Sequence[Cell], name_of: Callable[[int], str]) -> None:
    """Draw the nodes of a draft in their `cells`, with lines from parents to children."""
    accepted = set(step.draft.accepted)
    for node in sorted(range(len(cells)), key=lambda node: node in accepted):
        if node:
            start, width = cells[step.draft.parents[node]], line_width(node in accepted)
            line(axes, start, cells[node], INK["medusa"], width, zorder=1)
        style = ROOT if not node else ACCEPTED if node in accepted else GUESS
        box(axes, cells[node], name_of(step.draft.ids[node]), style)


def line_width(accepted: bool) -> float:
    """Return the width of a line of the tree, in points."""
    return 2.8 if accepted else 1.0


def line(axes: Axes, start: Cell, end: Cell, color: str, width: float, zorder: int) -> None:
    """Draw a curve from the box in the cell `start` to the box in the next column's cell `end`."""
    (left, top), (right, bottom) = (start[0] + BOX[0] / 2, start[1]), (end[0] - BOX[0] / 2, end[1])
    bend = (left + right) / 2
    curve = Path([(left, top), (bend, top), (bend, bottom), (right, bottom)], [Path.MOVETO, *[Path.CURVE4] * 3])
    axes.add_patch(PathPatch(curve, fill=False, edgecolor=color, linewidth=width, capstyle="butt", zorder=zorder))


def box(axes: Axes, cell: Cell, label: str, style: Style) -> None:
    """Draw a token in its cell."""
    (column, row), (width, height) = cell, BOX
    corner, rounded = (column - width / 2, row - height / 2), "round,pad=0,rounding_size=0.05"
    for face, edge in (
        (INK["paper"], "none"),
        (style.face, style.edge),
    ):  # paper first, under a face that is not opaque
        axes.add_patch(
            FancyBboxPatch(
                corner, width, height, rounded, fc=face, ec=edge, lw=1, mutation_aspect=COLUMN / ROW, zorder=3
            )
        )
    shown = label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"
    axes.text(column, row, shown, ha="center", va="center", fontsize=SIZE, color=style.text, zorder=4, parse_math=False)


def legend() -> list[Line2D]:
    """Make the samples of the legend."""
    return [
        Line2D([], [], color=INK["line"], lw=3, label=f"a pair of at least {STRONG:.0%}"),
        Line2D([], [], color=INK["medusa"], lw=line_width(False), label="in the tree"),
        Line2D([], [], color=INK["medusa"], lw=line_width(True), label="accepted"),
    ]
