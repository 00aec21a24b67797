"""Find the best tree for these heads on this machine, and keep it for --tree auto.

  medusa calibrate --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl
  medusa calibrate --backbone org/model --heads runs/heads --batch-size 8 --plot calibration.png

The backbone continues the prompts, or openings of its own if there are none. The right guesses of the heads are counted
where steps start, trees of several sizes are grown from the counts, and a step of each is timed here. The tree with the
most tokens per second wins; one node means that plain decoding is fastest. A quarter of the texts is held out, to
measure the tau that was predicted.
"""

from __future__ import annotations

import argparse

from medusa.commands import common
from medusa.errors import RequestError


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

    from decode.bench.calibration.calibrate import calibrate, measured_tau
    from decode.bench.calibration.recording import continued_texts, own_texts
    from decode.bench.calibration.stored import files_for, store
    from decode.bench.methods import medusa_method
    from decode.bench.report.terminal import print_calibration
    from decode.request import require_fitting
    from medusa.backbone import Backbone
    from medusa.records.record import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    heads = common.open_heads(args, loaded)
    common.hint_at_bfloat16(args, loaded)
    model, tokenizer = loaded.model, loaded.tokenizer
    prompts = [prompt_ids(record, tokenizer) for record in records]
    require_fitting(prompts, Backbone(model))
    with common.console(args).status("writing") as status:
        if prompts:
            texts = continued_texts(model, tokenizer, prompts, settings, args.seed)
        else:
            texts = own_texts(model, settings, loaded.bos_token_id)
        held_out = [prompt for prompt, _ in texts[3::4]]  # every fourth
        kept = [text for index, text in enumerate(texts) if index % 4 != 3] or texts
        found = calibrate(model, heads, kept, settings, args.batch_size, rounds=args.rounds, on_progress=status.update)
        status.update("measuring tau")
        seeds, measured = [args.seed] * len(held_out), None
        if held_out:
            measured = measured_tau(medusa_method(model, heads, settings, tokenizer, found.tree), held_out, seeds)
    if args.prompts:
        found.texts.source = args.prompts
    place = store(files_for(common.heads_folder(args.heads)), found)
    print_calibration(common.output_console(args), found, measured, place)
    if args.plot:
        from decode.bench.report.plots import calibration_plot

        calibration_plot(found).savefig(args.plot, dpi=140, bbox_inches="tight")
    common.write_results(args, found.to_json() | {"measured_tau": measured, "kept_in": str(place)})
