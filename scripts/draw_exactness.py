"""Draw the pictures of docs/exactness.md: accepted and residual mass, and a million draws on the demo backbone.

python scripts/draw_exactness.py docs/images
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from decode.bench.losslessness.cases import RULES
from decode.bench.losslessness.experiment import Experiment
from decode.bench.report.page import token_name
from decode.bench.report.plots import INK, frequencies
from decode.drafters.layouts import resolve_tree
from decode.drafters.trained_heads import TrainedHeads
from decode.settings import Settings
from medusa.files import ASSETS
from medusa.heads.independent import MedusaHeads
from medusa.loading import load_backbone
from script_tools import run_script, script_parser

PROMPTS = ASSETS / "prompts.jsonl"


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the two PNG files go")
    parser.add_argument(
        "--prompt",
        type=int,
        choices=range(1, 25),
        default=2,
        metavar="N",
        help="line of the package's prompts (default: %(default)s)",
    )
    parser.add_argument("--draws", type=int, default=1_000_000)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    draw_residual().savefig(args.folder / "rejection.png", dpi=150, bbox_inches="tight")
    draw_experiment(args.prompt, args.draws).savefig(args.folder / "verify.png", dpi=120, bbox_inches="tight")


def draw_residual() -> Figure:
    """Draw two distributions over eight words: which part of the target is accepted, and which is residual."""
    words = ["the", "a", "his", "her", "one", "my", "no", "all"]
    p = torch.tensor([0.34, 0.22, 0.14, 0.10, 0.08, 0.06, 0.04, 0.02])
    q = torch.tensor([0.18, 0.36, 0.05, 0.20, 0.04, 0.10, 0.05, 0.02])
    both, at = torch.minimum(p, q), range(len(words))
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots()
    axes.bar(at, both, color=INK["medusa"], label=f"min(p, q): accepted, {float(both.sum()):.2f} in all")
    axes.bar(at, p - both, bottom=both, color=INK["violet"], label="max(0, p - q): residual, drawn after a rejection")
    axes.bar(at, q - both, bottom=both, fill=False, edgecolor=INK["amber"], ls="--", label="q - p: drafted, rejected")
    axes.set_xticks(list(at), words)
    axes.set_ylabel("probability")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_experiment(line: int, draws: int) -> Figure:
    """Draw the experiment of `medusa verify` for one prompt of the package."""
    loaded, heads = load_backbone("demo"), MedusaHeads.from_pretrained("demo")
    assert loaded.tokenizer is not None
    record = json.loads(PROMPTS.read_text(encoding="utf-8").splitlines()[line - 1])
    prompt = loaded.tokenizer(record["prompt"]).input_ids
    generator = torch.Generator().manual_seed(0)
    source = TrainedHeads(heads, resolve_tree(None, heads))
    experiment = Experiment(loaded.model, source, prompt, Settings(temperature=1.0), generator)
    cases = [experiment.run(rule, 0, draws) for rule in RULES[:2]]
    return frequencies(cases, partial(token_name, loaded.tokenizer))


if __name__ == "__main__":
    run_script(main)
