"""Draw the pictures of docs/heads.md: what each kind of head reads, one picture a kind.

python scripts/draw_kinds.py docs/images/kinds
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from decode.bench.report.plots import INK, WIDTH
from script_tools import run_script, script_parser

HEADS = (1, 2, 3)
TOKENS = ("root", "guess 1", "guess 2")  # the tokens before those that the heads guess
LABELS = {"h": "hidden\nstate", "text": "text\nbefore", "layer": "own\nlayer"}
COLORS = {"h": "blue", "text": "plain", "layer": "violet"} | dict.fromkeys(TOKENS, "amber")
BOX = (0.62, 0.36)  # width and height
KINDS = {  # arrows from box to box, a number being a head; the caption
    "medusa": ("h>1, h>2, h>3", "all heads start from the same hidden state"),
    "cascade": ("h>1, 1>2, 2>3", "a head takes the output vector of the one before"),
    "hydra": (
        "h>1, h>2, h>3, root>1, root>2, root>3, guess 1>2, guess 1>3, guess 2>3",
        "a head reads h and all tokens on the path before its own",
    ),
    "recurrent": (
        "h>1, 1>2, 2>3, root>1, guess 1>2, guess 2>3",
        "a head takes the one before's output and the token before its own",
    ),
    "eagle": (
        "h>1, 1>2, 2>3, root>1, guess 1>2, guess 2>3, text>1, text>2, text>3",
        "one layer for all steps, which looks back at the text and at its own path",
    ),
    "prefix": (
        "text>layer, h>layer, layer>1, layer>2, layer>3",
        "a decoder layer of the heads' own, before heads of any kind",
    ),
}
BENDS = {"medusa": 0.3, "hydra": -0.22, "prefix": -0.3}  # of arrows that pass a head


def draw(kind: str) -> Figure:
    """Draw inputs below, heads in the middle, guesses above."""
    told, caption = KINDS[kind]
    arrows = [tuple(arrow.split(">")) for arrow in told.split(", ")]
    figure = Figure(figsize=(WIDTH, 2.5))
    axes = figure.subplots()
    shift = float(kind == "prefix")
    places = {"h": (0.0, 1.0)}
    places |= {str(k): (k + shift, 1.0) for k in HEADS} | {f"guess {k}.": (k + shift, 2.0) for k in HEADS}
    if ("root", "1") in arrows:
        places |= {token: (float(k), 0.0) for k, token in enumerate(TOKENS, 1)}
    if "text" in told:
        places["text"] = (0.0, 0.0)
    if "layer" in told:
        places["layer"] = (1.0, 1.0)
    step = "step" if kind == "eagle" else "head"
    boxes = {name: box(axes, name, f"{step} {name}" if name.isdecimal() else name, at) for name, at in places.items()}
    for start, end in [(str(k), f"guess {k}.") for k in HEADS] + arrows:
        passes = start == "layer" or (start == "h" and end in ("2", "3"))
        link(axes, boxes[start], boxes[end], places[start], places[end], BENDS.get(kind, 0.0) if passes else 0.0)
    lowest = min(y for _, y in places.values())
    axes.set_xlim(-0.5, len(HEADS) + shift + 0.5)
    axes.set_ylim(lowest - 0.8, 2.3)
    axes.text(-0.4, lowest - 0.7, caption, fontsize=9, color=INK["faint"])
    axes.set_title(kind, loc="left", fontsize=12, color=INK["ink"])
    axes.axis("off")
    return figure


def box(axes: Axes, name: str, label: str, place: tuple[float, float]) -> FancyBboxPatch:
    """Draw a labelled box; guesses, whose names end in a dot, are words without a box."""
    (x, y), (width, height) = place, BOX
    is_guess = name.endswith(".")
    color = INK["paper" if is_guess else COLORS.get(name, "medusa")]
    corner = (x - width / 2, y - height / 2)
    patch = FancyBboxPatch(corner, width, height, "round,pad=0.04", facecolor=color, edgecolor="none")
    axes.add_patch(patch)
    ink, label = INK["ink"] if is_guess else "white", LABELS.get(name, label.rstrip("."))
    axes.text(x, y, label, ha="center", va="center", fontsize=10, color=ink, linespacing=0.95, zorder=3)
    return patch


def link(
    axes: Axes,
    start: FancyBboxPatch,
    end: FancyBboxPatch,
    start_at: tuple[float, float],
    end_at: tuple[float, float],
    bend: float,
) -> None:
    """Draw an arrow between the edges of two boxes."""
    style = {"arrowstyle": "-|>", "mutation_scale": 10, "color": INK["faint"], "linewidth": 1.1, "shrinkA": 1}
    style |= {"shrinkB": 1, "patchA": start, "patchB": end, "connectionstyle": f"arc3,rad={bend}"}
    axes.annotate("", xy=end_at, xytext=start_at, zorder=0, arrowprops=style)


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the PNG files go")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        draw(kind).savefig(args.folder / f"{kind}.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    run_script(main)
