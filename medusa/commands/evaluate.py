"""Measure how often each head's best guesses hold the backbone's own token.

  medusa evaluate --backbone demo --heads demo --data prompts.jsonl

The backbone first continues the start of every record greedily. Heads are compared with that text, not with the file.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from medusa.commands import common
from medusa.records.sources import DOCUMENT_SEPARATOR

if TYPE_CHECKING:
    from rich.table import Table

    from train.evaluate import Accuracy

OPENING = 16  # tokens of a text that serve as its prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser)
    group = parser.add_argument_group("data")
    group.add_argument("--data", dest="prompts", required=True, metavar="D", help="prompts or texts, as for --prompts")
    group.add_argument("--max-prompts", type=common.positive, default=100, metavar="N", help="default: %(default)s")
    group.add_argument("--max-new-tokens", type=common.positive, default=128, metavar="N", help="default: %(default)s")
    group.add_argument("--split", default="train", help="of a Hub dataset (default: train)")
    group.add_argument(
        "--document-separator", default=DOCUMENT_SEPARATOR, metavar="LINE", help="in a .txt file (default: %(default)s)"
    )
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    from rich.progress import track

    records = common.read_prompts(args)
    common.check_output(args.json)
    common.check_models(args)

    from decode.bench.methods import plain_method
    from decode.request import require_fitting
    from decode.settings import Settings
    from medusa.backbone import Backbone
    from medusa.records.record import prompt_ids
    from train.evaluate import OwnText, head_accuracy

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    backbone = Backbone(loaded.model)
    heads = common.open_heads(args, loaded)
    prompts = []
    for record in records:
        ids = prompt_ids(record, loaded.tokenizer)
        prompts.append(ids if record.is_prompt or record.prompt_tokens else ids[:OPENING])
    require_fitting(prompts, backbone)
    method = plain_method(loaded.model, Settings(max_new_tokens=args.max_new_tokens), loaded.tokenizer)
    texts = []
    for prompt in track(prompts, "writing", console=common.console(args), disable=args.quiet):
        result = method([prompt], None)[0]
        texts.append(OwnText(result.input_ids + result.new_ids, len(result.input_ids)))
    accuracy = head_accuracy(backbone, heads, texts)
    common.output_console(args).print(_table(accuracy))
    common.write_results(args, accuracy.to_dict())


def _table(accuracy: Accuracy) -> Table:
    from rich.table import Table

    table = Table(title=f"right guesses at {accuracy.tokens} positions of the backbone's own greedy text")
    for name in ("head", "top 1", "top 5", "top 10", "top 1 if all before were right"):
        table.add_column(name, justify="right")
    for head in accuracy.heads:
        shares = [*head.top.values(), head.conditional_top1]
        table.add_row(str(head.head), *(f"{share:.3f}" for share in shares))
    return table
