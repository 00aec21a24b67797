"""Evidence that decoding with heads changes nothing: greedy texts compared, and a million draws against the target.

  medusa verify --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl
  medusa verify --backbone demo --drafter ngram --prompts medusa/assets/prompts.jsonl
  medusa verify --backbone org/model --heads org/heads --prompts own.jsonl --full --report evidence.html

Greedy: every prompt with and without heads. Sampling: for the first prompts, a million draws of the tokens after a
fixed root, by both forms of rejection, against the backbone's own distribution; the lossy rules go through the same
experiment and are seen to differ. The report is a page with tables and pictures. Exit status 1: there is evidence
against equality. The chance that draws give it where nothing is wrong is at most 1 in 10,000.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa.commands import common
from medusa.files import require_absent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    common.add_drafter(parser)
    common.add_amateur(parser)
    common.add_prompts(parser)
    group = parser.add_argument_group("what is tried")
    group.add_argument("--max-new-tokens", type=common.positive, default=128, metavar="N", help="greedy (default: 128)")
    group.add_argument("--batch-size", type=common.positive, default=1, metavar="N", help="greedy, with heads")
    group.add_argument("--tree", metavar="FILE|NAME", help="as for medusa generate")
    group.add_argument("--draws", type=common.positive, default=1_000_000, metavar="N", help="default: a million")
    group.add_argument(
        "--sampled-prompts", type=common.positive, default=4, metavar="N", help="drawn from (default: the first 4)"
    )
    group.add_argument("--full", action="store_true", help="temperatures 0.5, 1 and 1.5, each with top-p 1 and 0.9")
    common.add_stop_drafting(group)
    common.add_compile(group)
    group.add_argument("--epsilon", type=float, default=0.09, help="of typical acceptance (default: 0.09)")
    group.add_argument("--delta", type=float, default=0.3, help="of typical acceptance (default: 0.3)")
    group.add_argument(
        "--report", default="verify.html", metavar="FILE", help="a page with pictures (default: verify.html)"
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing report")
    common.add_machine(parser)


def run(args: argparse.Namespace) -> int:
    from decode.settings import Settings

    settings = Settings(
        max_new_tokens=args.max_new_tokens,
        epsilon=args.epsilon,
        delta=args.delta,
        stop_drafting=args.stop_drafting,
        compile=args.compile,
    )
    config = common.plan_of(args, args.drafter)
    common.contrast_of(args)
    records = common.read_prompts(args)
    for path in (args.json, args.report):
        common.check_output(path)
    require_absent(Path(args.report), args.overwrite)
    common.check_models(args, config)

    from decode.bench.losslessness.run import Verification, verify
    from decode.bench.report.terminal import print_verification
    from decode.bench.report.verify_page import TokenNames, page
    from medusa.records import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    source = common.open_source(args, loaded, config)
    settings = common.with_amateur(args, loaded, settings)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    common.require_fitting(prompts, loaded, settings.amateur)
    asked = Verification(
        loaded,
        args.heads,
        args.drafter or "heads",
        common.drafter_json(args.drafter, source)["tree"],
        source,
        settings,
        prompts,
        batch_size=args.batch_size,
        draws=args.draws,
        sampled_prompts=args.sampled_prompts,
        full=args.full,
        seed=args.seed,
    )
    with common.progress_bars(args) as start_progress:
        outcome = verify(asked, start_progress)
    common.write_results(args, outcome.to_json())
    page(outcome, TokenNames(loaded.tokenizer)).save(Path(args.report))
    print_verification(common.output_console(args), outcome, args.full, args.report)
    return 0 if outcome.passed else 1
