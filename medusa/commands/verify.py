"""Test that decoding with heads changes nothing: compare greedy texts, and a million draws with the target.

  medusa verify --backbone demo --heads demo --prompts medusa/assets/prompts.jsonl
  medusa verify --backbone demo --drafter ngram --prompts medusa/assets/prompts.jsonl
  medusa verify --backbone org/model --heads org/heads --prompts own.jsonl --full --report evidence.html

Greedy: every prompt is decoded with and without drafts. Sampling: for the first prompts, a million draws of the tokens
after a fixed root are compared with the backbone's own distribution, for both forms of rejection. The lossy rules go
through the same experiment and are expected to differ. The report is a page with tables and pictures. Exit status 1
means evidence against equality. If nothing is wrong, the draws show such evidence in at most 1 of 10,000 runs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from medusa.commands import common
from medusa.files import require_absent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False)
    common.add_drafter(parser)
    common.add_amateur(parser)
    common.add_prompts(parser)
    group = parser.add_argument_group("what is tried")
    group.add_argument(
        "--max-new-tokens",
        type=common.positive,
        default=128,
        metavar="N",
        help="tokens of a greedy text (default: 128)",
    )
    group.add_argument(
        "--batch-size",
        type=common.positive,
        default=1,
        metavar="N",
        help="prompts at a time with drafts, greedy (default: 1)",
    )
    group.add_argument("--tree", metavar="FILE|NAME", help="as for medusa generate")
    group.add_argument(
        "--draws", type=common.positive, default=1_000_000, metavar="N", help="draws by each rule (default: a million)"
    )
    group.add_argument(
        "--sampled-prompts",
        type=common.positive,
        default=4,
        metavar="N",
        help="prompts to draw from, the first ones (default: 4)",
    )
    group.add_argument(
        "--full", action="store_true", help="draw at temperatures 0.5, 1 and 1.5, each with top-p 1 and 0.9"
    )
    common.add_stop_drafting(group)
    common.add_compile(group)
    group.add_argument("--epsilon", type=float, default=0.09, help="of typical acceptance (default: 0.09)")
    group.add_argument("--delta", type=float, default=0.3, help="of typical acceptance (default: 0.3)")
    group.add_argument("--report", default="verify.html", metavar="FILE", help="write this page (default: verify.html)")
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

    from decode.bench.losslessness.verify import Verification, verify
    from decode.bench.report.page import verify_page
    from decode.bench.report.terminal import print_verification
    from medusa.records.record import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    source = common.open_source(args, loaded, config)
    settings = common.with_amateur(args, loaded, settings)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    common.require_fitting(prompts, loaded, settings.amateur)
    asked = Verification(
        loaded=loaded,
        source=source,
        settings=settings,
        prompts=prompts,
        heads=args.heads,
        drafter=args.drafter or "heads",
        tree=common.drafter_json(args.drafter, source)["tree"],
        batch_size=args.batch_size,
        seed=args.seed,
        draws=args.draws,
        sampled_prompts=args.sampled_prompts,
        full=args.full,
    )
    with common.progress_bars(args) as start_progress:
        outcome = verify(replace(asked, start_progress=start_progress))
    common.write_results(args, outcome.to_json())
    verify_page(outcome).save(Path(args.report))
    print_verification(common.output_console(args), outcome, args.full, args.report)
    return 0 if outcome.passed else 1
