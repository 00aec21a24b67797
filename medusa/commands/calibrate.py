"""Find the best tree for these heads on this machine, and keep it for --tree auto.

  medusa calibrate --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl
  medusa calibrate --backbone org/model --heads runs/heads --batch-size 8 --plot calibration.png

The backbone writes continuations of the prompts (without any: of openings of its own). Which guesses of the heads come
true is counted where steps start, trees of several sizes are grown from that, and a step of each is timed here. The
tree with the most tokens per second wins; one node means that plain decoding is fastest. A quarter of the texts is held
back, to measure what was predicted.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands import common
from medusa.errors import RequestError

if TYPE_CHECKING:
    from decode.bench.calibration.stored import Calibration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser)
    common.add_prompts(parser, text=False)
    common.add_generation(parser, max_new_tokens=128, tree=False)
    parser.add_argument("--rounds", type=common.positive, default=3, metavar="N", help="of timing (default: 3)")
    parser.add_argument("--plot", metavar="FILE.png", help="a picture: tau, time of a step and speed against nodes")
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    settings = common.settings_of(args)
    if args.compile:
        raise RequestError(
            "--compile would compile every tree that is tried, for minutes; leave it out: --tree auto takes what is "
            "found without it there, too, and medusa benchmark --compile compares trees that you name"
        )
    records = common.read_prompts(args) if args.prompts else []
    for path in (args.json, args.plot):
        common.check_output(path)
    common.check_models(args)

    from rich.progress import Progress

    from decode.bench.calibration.calibrate import calibrate, own_texts
    from decode.bench.calibration.stored import files_for, store
    from decode.bench.methods import medusa_method, plain_method
    from decode.request import require_fitting
    from decode.results import prompt_seeds, tau
    from medusa.backbone import Backbone
    from medusa.records.prompts import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    heads = common.open_heads(args, loaded)
    common.hint_at_bfloat16(args, loaded)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    require_fitting(prompts, Backbone(loaded.model))
    with Progress(console=common.console(args), disable=args.quiet, transient=True) as progress:
        task = progress.add_task("writing", total=None)
        if prompts:
            method, texts = plain_method(loaded.model, settings, loaded.tokenizer), []
            for start in range(0, len(prompts), WRITTEN_AT_ONCE):
                batch = prompts[start : start + WRITTEN_AT_ONCE]
                seeds = prompt_seeds(args.seed, range(start, start + len(batch)))
                texts += [(result.input_ids, result.new_ids) for result in method(batch, seeds=seeds)]
        else:
            texts = own_texts(loaded.model, settings, loaded.bos_token_id)
        held_back = texts[3::4]  # every fourth
        found = calibrate(
            loaded.model,
            heads,
            [text for index, text in enumerate(texts) if index % 4 != 3] or texts,
            settings,
            args.batch_size,
            rounds=args.rounds,
            on_progress=lambda what: progress.update(task, description=what),
        )
        progress.update(task, description="measuring tau")
        decode = medusa_method(loaded.model, heads, settings, loaded.tokenizer, found.tree)
        results = [result for prompt, _ in held_back for result in decode([prompt], seeds=[args.seed])]
    if args.prompts:
        found.texts.source = args.prompts
    measured = tau(results) if results else None
    place = store(files_for(common.heads_folder(args.heads)), found)
    show(args, found, measured, place)
    if args.plot:
        from decode.bench.report.plots import calibration_plot

        calibration_plot(found).savefig(args.plot, dpi=140, bbox_inches="tight")
    common.write_results(args, found.to_json() | {"measured_tau": measured, "kept_in": str(place)})


WRITTEN_AT_ONCE = 16


def show(args: argparse.Namespace, found: Calibration, measured: float | None, place: Path) -> None:
    """The outcome for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for name in ("nodes", "tree", "predicted tau", "ms a step", "tokens/s", "against plain", ""):
        table.add_column(name, justify="right")
    plain = found.points[0].tokens_per_second
    for index, point in enumerate(found.points):
        rate = point.tokens_per_second
        kind = "plain" if point.nodes == 1 else "dynamic" if point.dynamic else "static"
        cells = [
            str(point.nodes),
            kind,
            f"{point.tau:.2f}",
            f"{point.step_ms:.2f}",
            f"{rate:.0f}",
            f"{rate / plain:.2f}",
        ]
        table.add_row(*cells, "chosen" if index == found.chosen else "", style="bold" if index == found.chosen else "")
    console, best = common.output_console(args), found.best
    console.print(table)
    if best.nodes == 1:
        console.print("plain decoding is fastest here: these heads guess too little for what a tree costs")
    if measured is not None:
        console.print(f"predicted tau {best.tau:.3f}, measured on texts held back {measured:.3f}")
    console.print(f"kept for --tree auto in {place}")
