"""Draw the pictures of the documentation.

    python scripts/draw.py kinds docs/images/kinds         what each kind of head reads, one picture per kind
    python scripts/draw.py exactness docs/images           rejection sampling, and an experiment of medusa verify
    medusa benchmark demo --prompts demo --json b.json
    python scripts/draw.py benchmark b.json b.png          a benchmark
    python scripts/draw.py benchmark docs/results/fit_tinystories.json docs/images/benchmark.png
    python scripts/draw.py trellis runs/markov docs/images/trellis.png --prompt 'Mom said, "Lily, you'

The picture of a benchmark shows each method's speedup over plain decoding and its tokens per second, the depth of
accepted guesses, and the time of each stage of a step. `medusa benchmark --report` writes a page with more pictures.
The picture `trellis` shows one step of heads of kind `markov`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from decode.bench.figures import BenchmarkResult
from decode.bench.headline import counted
from decode.bench.losslessness.cases import RULES
from decode.bench.losslessness.experiment import Experiment
from decode.bench.report import plots
from decode.bench.report.page import token_name
from decode.bench.report.plots import INK
from decode.bench.report.trellis_plot import trellis_figure
from decode.bench.trellis_steps import trellis_steps
from decode.drafters.layouts import resolve_tree, with_shortlist
from decode.drafters.trained_heads import TrainedHeads
from decode.settings import Settings
from medusa.errors import RequestError
from medusa.files import ASSETS, read_json
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from medusa.records.sources import read_records
from script_tools import run_script, script_parser

HEADS = (1, 2, 3)
TOKENS = ("root", "guess 1", "guess 2")  # the tokens before those that the heads guess
PICTURES = yaml.safe_load(Path(__file__).with_name("draw_kinds.yaml").read_text(encoding="utf-8"))
KINDS, LABELS, COLORS = PICTURES["kinds"], PICTURES["labels"], PICTURES["colors"]
BOX = (0.62, 0.36)  # width and height


def draw_kind(kind: str) -> Figure:
    """Draw what a kind of heads reads: inputs at the bottom, heads in the middle, guesses at the top."""
    edges, caption = KINDS[kind]["arrows"], KINDS[kind]["caption"]
    arrows = [tuple(arrow.split(">")) for arrow in edges.split(", ")]
    figure = Figure(figsize=(plots.WIDTH, 2.5))
    axes = figure.subplots()
    shift = float(kind == "prefix")
    places = {"h": (0.0, 1.0)} | {str(k): (k + shift, 1.0) for k in HEADS}
    places |= {f"guess {k}.": (k + shift, 2.0) for k in HEADS}
    if ("root", "1") in arrows:
        places |= {token: (float(k), 0.0) for k, token in enumerate(TOKENS, 1)}
    others = {"text": (0.0, 0.0), "layer": (1.0, 1.0)}
    places |= {name: at for name, at in others.items() if name in edges}
    step = "step" if kind == "eagle" else "head"
    boxes = {name: box(axes, name, f"{step} {name}" if name.isdecimal() else name, at) for name, at in places.items()}
    for start, end in [(str(k), f"guess {k}.") for k in HEADS] + arrows:
        passes = start == "layer" or (start == "h" and end in ("2", "3"))
        style = {"arrowstyle": "-|>", "mutation_scale": 10, "color": INK["faint"], "linewidth": 1.1, "shrinkA": 1}
        style |= {"shrinkB": 1, "patchA": boxes[start], "patchB": boxes[end]}
        style["connectionstyle"] = f"arc3,rad={KINDS[kind].get('bend', 0.0) if passes else 0.0}"
        axes.annotate("", xy=places[end], xytext=places[start], zorder=0, arrowprops=style)
    lowest = min(y for _, y in places.values())
    axes.set(xlim=(-0.5, len(HEADS) + shift + 0.5), ylim=(lowest - 0.8, 2.3))
    axes.text(-0.4, lowest - 0.7, caption, fontsize=9, color=INK["faint"])
    axes.set_title(kind, loc="left", fontsize=12, color=INK["ink"])
    axes.axis("off")
    return figure


def box(axes: Axes, name: str, label: str, place: tuple[float, float]) -> FancyBboxPatch:
    """Draw a labelled box at `place`; a guess, whose name ends in a dot, gets only a label."""
    (x, y), (width, height) = place, BOX
    is_guess = name.endswith(".")
    color = INK["paper" if is_guess else COLORS.get(name, "medusa")]
    corner = (x - width / 2, y - height / 2)
    patch = axes.add_patch(FancyBboxPatch(corner, width, height, "round,pad=0.04", facecolor=color, edgecolor="none"))
    ink, label = INK["ink"] if is_guess else "white", LABELS.get(name, label.rstrip("."))
    axes.text(x, y, label, ha="center", va="center", fontsize=10, color=ink, linespacing=0.95, zorder=3)
    return patch


def draw_residual() -> Figure:
    """Draw rejection sampling with target p and draft q over eight tokens: the accepted part and the residual."""
    tokens = ["the", "a", "his", "her", "one", "my", "no", "all"]
    p = torch.tensor([0.34, 0.22, 0.14, 0.10, 0.08, 0.06, 0.04, 0.02])
    q = torch.tensor([0.18, 0.36, 0.05, 0.20, 0.04, 0.10, 0.05, 0.02])
    both, at = torch.minimum(p, q), range(len(tokens))
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots()
    axes.bar(at, both, color=INK["medusa"], label=f"min(p, q): accepted, {float(both.sum()):.2f} in all")
    axes.bar(at, p - both, bottom=both, color=INK["violet"], label="max(0, p - q): residual, drawn after a rejection")
    axes.bar(at, q - both, bottom=both, fill=False, edgecolor=INK["amber"], ls="--", label="q - p: drafted, rejected")
    axes.set_xticks(list(at), tokens)
    axes.set_ylabel("probability")
    axes.legend(frameon=False)
    return plots.without_frames(figure)


def draw_experiment(line: int, draws: int) -> Figure:
    """Draw the experiment of `medusa verify` with the shipped models; `line` chooses one of the shipped prompts."""
    loaded, heads = load_backbone("demo"), MedusaHeads.from_pretrained("demo")
    prompt = loaded.tokenizer(list(read_records(str(ASSETS / "prompts.jsonl")))[line - 1].text).input_ids
    generator = torch.Generator().manual_seed(0)
    source = TrainedHeads(heads, resolve_tree(None, heads))
    experiment = Experiment(loaded.model, source, prompt, Settings(temperature=1.0), generator)
    cases = [experiment.run(rule, 0, draws) for rule in RULES[:2]]
    return plots.frequencies(cases, partial(token_name, loaded.tokenizer))


def draw_benchmark(result: BenchmarkResult) -> Figure:
    """Draw speeds, speedups, accepted depths and step times of a benchmark, with the machine below them."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, hspace=0.04)
    panels = figure.subplots(2, 2)
    plots.speedups(panels[0, 0], result.methods)
    plots.rates(panels[0, 1], result.methods)
    plots.depths(panels[1, 0], result.medusa)
    plots.stages(panels[1, 1], {name: of.step_ms for name, of in result.methods.items() if of.step_ms})
    machine, settings = result.machine, result.settings
    note = f"{result.subject}; {settings.prompts} prompts, {settings.max_new_tokens} new tokens, "
    note += f"temperature {settings.temperature:g}, {settings.nodes} nodes; {machine.device}, "
    note += f"{counted(machine.threads, 'thread')}, {machine.dtype}, torch {machine.torch}"
    figure.supxlabel(note, fontsize=8, color=INK["faint"])
    return plots.without_frames(figure)


def draw_trellis(heads: MedusaHeads, prompt: str, number: int, tree: str, candidates: int) -> Figure:
    """Draw the step with this number, from 0, of greedy decoding with `heads` and the backbone that they name."""
    loaded = load_backbone(heads.config.base_model_name_or_path)
    ids = torch.tensor([loaded.tokenizer(prompt).input_ids])
    layout = with_shortlist(resolve_tree(tree, heads), candidates)
    steps = trellis_steps(
        loaded.model, heads, ids, tree=layout, max_new_tokens=1 + (1 + heads.config.num_heads) * (number + 1)
    )
    step = next(islice(steps, number, None), None)
    if step is None:
        raise RequestError(f"the text ends before step {number}; give a smaller --step")
    return trellis_figure(step, partial(token_name, loaded.tokenizer))


def save(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a figure to a file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    pictures = parser.add_subparsers(dest="picture", required=True)
    pictures.add_parser("kinds").add_argument("folder", type=Path, help="write a PNG file for each kind here")
    exactness = pictures.add_parser("exactness")
    exactness.add_argument("folder", type=Path, help="write two PNG files here")
    line_help = "line of the package's prompts (default: %(default)s)"
    exactness.add_argument("--prompt", type=int, choices=range(1, 25), default=2, metavar="N", help=line_help)
    exactness.add_argument("--draws", type=int, default=1_000_000, help="sampled tokens (default: %(default)s)")
    benchmark = pictures.add_parser("benchmark")
    benchmark.add_argument("benchmark", type=Path, help="JSON of medusa benchmark")
    benchmark.add_argument("file", type=Path, help="PNG to write")
    trellis = pictures.add_parser("trellis")
    trellis.add_argument("heads", help="folder of heads of kind markov, which names their backbone")
    trellis.add_argument("file", type=Path, help="PNG to write")
    trellis.add_argument("--prompt", required=True, help="the text before the first step")
    trellis.add_argument(
        "--step", type=int, default=0, help="number of the step to draw, from 0 (default: %(default)s)"
    )
    trellis.add_argument("--tree", default="dynamic:16", help="tree to grow (default: %(default)s)")
    trellis.add_argument("--candidates", type=int, default=16, help="candidates of each head (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.picture == "trellis" and (args.step < 0 or args.candidates < 1):
        raise RequestError("--step must be at least 0, and --candidates at least 1")
    match args.picture:
        case "kinds":
            for kind in KINDS:
                save(draw_kind(kind), args.folder / f"{kind}.png")
        case "exactness":
            save(draw_residual(), args.folder / "rejection.png")
            save(draw_experiment(args.prompt, args.draws), args.folder / "verify.png", dpi=120)
        case "benchmark":
            save(draw_benchmark(BenchmarkResult.from_json(read_json(args.benchmark), str(args.benchmark))), args.file)
        case "trellis":
            heads = MedusaHeads.from_pretrained(args.heads)
            save(draw_trellis(heads, args.prompt, args.step, args.tree, args.candidates), args.file)


if __name__ == "__main__":
    run_script(main)
