"""Train heads on a frozen backbone, as a YAML file says; `key=value` overrides any of its keys.

  medusa train configs/medusa1.yaml
  medusa train configs/medusa1.yaml backbone=org/model data=own.jsonl training.learning_rate=1e-3

Only heads are trained and saved. An interrupted run goes on with --resume. To see what would be taught, without
training and without the backbone's weights:

  medusa train configs/medusa1.yaml data=own.jsonl --inspect
"""

from __future__ import annotations

import argparse
import os

from medusa.commands import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG.yaml", help="backbone, data, output_dir, heads, training")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example heads.num=5")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in output_dir")
    parser.add_argument("--overwrite", action="store_true", help="train again where output_dir holds heads")
    parser.add_argument(
        "--inspect",
        nargs="?",
        type=common.positive,
        const=3,
        metavar="N",
        help="show N examples (default: 3) with what is taught in them, count the data, and do not train",
    )
    parser.add_argument("--ids", action="store_true", help="with --inspect: add a line for every token")
    parser.add_argument(
        "--plan", action="store_true", help="report what features on disk (cache_features) would take and save"
    )
    parser.add_argument("--threads", type=common.positive, help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--json", metavar="FILE", help="write the final figures")
    parser.add_argument("--quiet", action="store_true", help="print no progress and no log lines")


def run(args: argparse.Namespace) -> None:
    from train.data.preview import preview, show
    from train.recipe import load_recipe
    from train.run import plan_features, train

    common.check_output(args.json)
    config = load_recipe(args.config, args.overrides)
    args.seed = int(config.training.get("seed", 42))
    common.prepare_machine(args)
    figures: dict[str, object]
    if args.inspect:
        found = preview(config, args.inspect)
        show(found, common.output_console(args), ids=args.ids)
        figures = found.to_dict()
    elif args.plan:
        figures = plan_features(config, args.quiet).to_dict()
    else:
        figures = train(config, resume=args.resume, overwrite=args.overwrite, quiet=args.quiet).to_dict()
    if os.environ.get("RANK", "0") == "0":  # of several processes one writes
        common.write_results(args, figures)
