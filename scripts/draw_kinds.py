"""Draw what each kind of head reads, one picture a kind, for docs/kinds.md.

python scripts/draw_kinds.py docs/images/kinds

Other pictures of the pages come from `medusa benchmark --report` and `medusa verify --report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from decode.bench.report import plots
from decode.bench.report.plots import INK
from medusa.files import require_writable_folder
from script_tools import run_script, script_parser

HEADS = (1, 2, 3)
TOKENS = ("root", "guess 1", "guess 2")  # the tokens before those that the heads guess
PICTURES = yaml.safe_load(Path(__file__).with_name("draw_kinds.yaml").read_text(encoding="utf-8"))
KINDS, LABELS, COLORS = PICTURES["kinds"], PICTURES["labels"], PICTURES["colors"]
BOX = (0.62, 0.36)  # width and height


def draw_kind(kind: str) -> Figure:
    """Draw what a kind of heads reads: inputs at the bottom, heads in the middle, guesses at the top."""
    edges, caption, joined = KINDS[kind]["arrows"], KINDS[kind]["caption"], KINDS[kind].get("joined")
    arrows = [tuple(arrow.split(">")) for arrow in edges.split(", ")]
    figure = Figure(figsize=(plots.WIDTH, 2.5))
    axes = figure.subplots()
    shift = float(kind == "prefix")
    places = {"h": (0.0, 1.0)} if "h>" in edges else {}
    places |= {str(k): (k + shift, 1.0) for k in HEADS}
    places |= {f"guess {k}.": (k + shift, 2.0) for k in HEADS}
    if ("root", "1") in arrows:
        places |= {token: (float(k), 0.0) for k, token in enumerate(KINDS[kind].get("tokens", TOKENS), 1)}
    others = {"text": (0.0, 0.0), "layer": (1.0, 1.0)}
    places |= {name: at for name, at in others.items() if name in edges}
    step = "step" if kind == "eagle" else "head"
    named = {str(k): f"{step} {k}" for k in HEADS} if joined is None else {"1": "", "2": joined, "3": ""}
    boxes = {name: box(axes, name, named.get(name, name), at, joined is not None) for name, at in places.items()}
    for start, end in [(str(k), f"guess {k}.") for k in HEADS] + arrows:
        passes = start == "layer" or (start == "h" and end in ("2", "3"))
        style = {"arrowstyle": "-|>", "mutation_scale": 10, "color": INK["faint"], "linewidth": 1.1, "shrinkA": 1}
        style |= {"shrinkB": 1, "patchA": boxes[start], "patchB": boxes[end]}
        style["connectionstyle"] = f"arc3,rad={KINDS[kind].get('bend', 0.0) if passes else 0.0}"
        axes.annotate("", xy=places[end], xytext=places[start], zorder=0, arrowprops=style)
    lowest = min(y for _, y in places.values())
    axes.set(xlim=(-0.5, len(HEADS) + shift + (0.5 if joined is None else 0.6)), ylim=(lowest - 0.8, 2.3))
    axes.text(-0.4, lowest - 0.7, caption, fontsize=9, color=INK["faint"])
    axes.set_title(kind, loc="left", fontsize=12, color=INK["ink"])
    axes.axis("off")
    return figure


def box(axes: Axes, name: str, label: str, place: tuple[float, float], joined: bool = False) -> FancyBboxPatch:
    """Draw a labelled box at `place`; a guess, whose name ends in a dot, gets only a label. Heads can be `joined`."""
    (x, y), (width, height) = place, BOX
    width = 1.0 if joined and name.isdecimal() else width
    is_guess = name.endswith(".")
    color = INK["paper" if is_guess else COLORS.get(name, "medusa")]
    corner = (x - width / 2, y - height / 2)
    patch = axes.add_patch(FancyBboxPatch(corner, width, height, "round,pad=0.04", facecolor=color, edgecolor="none"))
    ink, label = INK["ink"] if is_guess else "white", LABELS.get(name, label.rstrip("."))
    axes.text(x, y, label, ha="center", va="center", fontsize=10, color=ink, linespacing=0.95, zorder=3)
    return patch


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="write a PNG file for each kind here")
    args = parser.parse_args(argv)
    require_writable_folder(args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        draw_kind(kind).savefig(args.folder / f"{kind}.png", dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    run_script(main)
