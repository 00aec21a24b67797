"""The pictures of docs/heads.md: what each kind of head reads, one picture a kind.

python scripts/draw_kinds.py docs/images/kinds
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from decode.bench.report.colors import INK
from decode.bench.report.plots import WIDTH

HEADS = 3
TOKENS = ["root", "guess 1", "guess 2"]  # the token before the one that head k guesses
BOX = (0.62, 0.36)  # width and height


class Arrow(NamedTuple):
    """From one box to another, by name."""

    start: str
    end: str
    bend: float = 0.0


def one_by_one(name: str) -> list[Arrow]:
    """h to head 1, head 1 to head 2, ..."""
    row = ["h", *(f"{name} {k}" for k in range(1, HEADS + 1))]
    return [Arrow(a, b) for a, b in pairwise(row)]


def fan(start: str = "h", bend: float = 0.3) -> list[Arrow]:
    """From one box to every head."""
    return [Arrow(start, f"head {k}", bend if k > 1 else 0.0) for k in range(1, HEADS + 1)]


def tokens_above(name: str) -> list[Arrow]:
    """Each token to the head that guesses the one after it."""
    return [Arrow(token, f"{name} {k}") for k, token in enumerate(TOKENS, 1)]


KINDS: dict[str, tuple[list[Arrow], str]] = {
    "medusa": (fan(), "all heads start from the same hidden state"),
    "cascade": (one_by_one("head"), "a head takes the output vector of the one before"),
    "hydra": (
        [*fan(bend=-0.22), *(Arrow(t, f"head {k}") for i, t in enumerate(TOKENS) for k in range(i + 1, HEADS + 1))],
        "a head reads h and all tokens on the path before its own",
    ),
    "recurrent": (
        [*one_by_one("head"), *tokens_above("head")],
        "a head takes the one before's output and the token before its own",
    ),
    "eagle": (
        [*one_by_one("step"), *tokens_above("step"), *(Arrow("text", f"step {k}") for k in range(1, HEADS + 1))],
        "one layer for all steps, which looks back at the text and at its own path",
    ),
    "prefix": (
        [
            Arrow("text", "layer"),
            Arrow("h", "layer"),
            *(Arrow("layer", f"head {k}", -0.3) for k in range(1, HEADS + 1)),
        ],
        "a decoder layer of the heads' own, before heads of any kind",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the PNG files go")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        draw(kind).savefig(args.folder / f"{kind}.png", dpi=150, bbox_inches="tight")


def draw(kind: str) -> Figure:
    """Inputs below, heads in the middle, guesses above."""
    arrows, caption = KINDS[kind]
    figure = Figure(figsize=(WIDTH, 2.5))
    axes = figure.subplots()
    step, shift = ("step" if kind == "eagle" else "head"), float(kind == "prefix")
    places = {"h": (0.0, 1.0)}
    places |= {f"{step} {k}": (k + shift, 1.0) for k in range(1, HEADS + 1)}
    places |= {f"guess {k}.": (k + shift, 2.0) for k in range(1, HEADS + 1)}
    if any(arrow.start in TOKENS for arrow in arrows):
        places |= {token: (float(k), 0.0) for k, token in enumerate(TOKENS, 1)}
    if kind in ("eagle", "prefix"):
        places["text"] = (0.0, 0.0)
    if kind == "prefix":
        places["layer"] = (1.0, 1.0)
    boxes = {name: box(axes, name, place) for name, place in places.items()}
    for k in range(1, HEADS + 1):
        link(axes, boxes, places, Arrow(f"{step} {k}", f"guess {k}."))
    for arrow in arrows:
        link(axes, boxes, places, arrow)
    lowest = min(y for _, y in places.values())
    axes.set_xlim(-0.5, HEADS + shift + 0.5)
    axes.set_ylim(lowest - 0.8, 2.3)
    axes.text(-0.4, lowest - 0.7, caption, fontsize=9, color=INK["faint"])
    axes.set_title(kind, loc="left", fontsize=12, color=INK["ink"])
    axes.axis("off")
    return figure


def box(axes: Axes, name: str, place: tuple[float, float]) -> FancyBboxPatch:
    """A labelled box; guesses are words without one."""
    (x, y), (width, height) = place, BOX
    color = {"h": "blue", "text": "plain", "layer": "violet"} | dict.fromkeys(TOKENS, "amber")
    is_guess = name.endswith(".")
    patch = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        "round,pad=0.04",
        facecolor=INK["paper" if is_guess else color.get(name, "medusa")],
        edgecolor="none",
    )
    axes.add_patch(patch)
    label = {"h": "hidden\nstate", "text": "text\nbefore", "layer": "own\nlayer"}.get(name, name.rstrip("."))
    ink = INK["ink"] if is_guess else "white"
    axes.text(x, y, label, ha="center", va="center", fontsize=10, color=ink, linespacing=0.95, zorder=3)
    return patch


def link(axes: Axes, boxes: dict[str, FancyBboxPatch], places: dict[str, tuple[float, float]], arrow: Arrow) -> None:
    """An arrow between two boxes' edges."""
    axes.annotate(
        "",
        xy=places[arrow.end],
        xytext=places[arrow.start],
        zorder=0,
        arrowprops={
            "arrowstyle": "-|>",
            "mutation_scale": 10,
            "color": INK["faint"],
            "linewidth": 1.1,
            "shrinkA": 1,
            "shrinkB": 1,
            "patchA": boxes[arrow.start],
            "patchB": boxes[arrow.end],
            "connectionstyle": f"arc3,rad={arrow.bend}",
        },
    )


if __name__ == "__main__":
    main()
