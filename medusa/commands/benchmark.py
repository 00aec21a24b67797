"""Measure the speedup: plain decoding, `model.generate` and heads take turns on the same prompts.

medusa benchmark --backbone demo --heads demo --prompts prompts.jsonl
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --tree topk:3,2 --json b.json
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from medusa.commands import common
from medusa.errors import RequestError

if TYPE_CHECKING:
    from decode.dynamic import Layout
    from decode.settings import Settings
    from medusa.backbone import Loaded
    from medusa.heads import MedusaHeads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser)
    common.add_prompts(parser)
    common.add_generation(parser, max_new_tokens=128)
    parser.add_argument("--rounds", type=common.positive, default=3, metavar="N", help="default: %(default)s")
    common.add_machine(parser)


def run(args: argparse.Namespace) -> None:
    settings = common.settings_of(args)
    records = common.read_prompts(args)
    common.check_output(args.json)
    common.check_models(args)

    from decode.request import require_fitting
    from medusa.backbone import Backbone
    from medusa.records import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    heads = common.open_heads(args, loaded)
    common.hint_at_bfloat16(args, loaded)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    require_fitting(prompts, Backbone(loaded.model))
    tree = common.choose_tree(args, loaded, heads, settings)
    outcome = measure(
        args, loaded, heads, tree, settings, prompts, [record.category for record in records], args.rounds
    )
    show(args, outcome)
    figures = outcome["methods"]["medusa"]
    common.warn_if_useless(figures["new_tokens"], figures["tau"])
    common.write_results(args, outcome)


def measure(
    args: argparse.Namespace,
    loaded: Loaded,
    heads: MedusaHeads,
    tree: Layout,
    settings: Settings,
    prompts: list[list[int]],
    categories: list[str | None],
    rounds: int,
) -> dict[str, Any]:
    """Take turns, and sum up: what `--json` writes."""
    import torch
    from rich.progress import Progress

    from decode import benchmark
    from decode.clock import StageClock
    from decode.results import medusa_method, plain_method, transformers_method
    from medusa.backbone import require_tree_support

    require_tree_support(loaded.model)
    if settings.stop and loaded.tokenizer is None:
        raise RequestError("--stop needs a tokenizer, and this backbone has none")
    wait = torch.cuda.synchronize if loaded.model.device.type == "cuda" else None
    clocks = {name: StageClock(wait) for name in ("plain", "medusa")}
    model, tokenizer = loaded.model, loaded.tokenizer
    contenders = [
        benchmark.Contender("plain", plain_method(model, settings, tokenizer, clocks["plain"]), clocks["plain"]),
        benchmark.Contender("transformers", transformers_method(model, settings, tokenizer)),
        benchmark.Contender(
            "medusa", medusa_method(model, heads, settings, tokenizer, tree, clocks["medusa"]), clocks["medusa"]
        ),
    ]
    batches = common.batches(prompts, args.batch_size)
    with Progress(console=common.console(args), disable=args.quiet, transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * len(batches))
        benchmark.run_rounds(contenders, batches, rounds, lambda: progress.advance(task), args.seed)
    return {
        "machine": benchmark.machine() | {"dtype": str(model.dtype).removeprefix("torch.")},
        "settings": settings.to_dict()
        | {
            "backbone": args.backbone,
            "heads": args.heads,
            "tree": common.tree_json(tree),
            "nodes": tree.num_nodes,
            "prompts": len(prompts),
            "rounds": rounds,
            "batch_size": args.batch_size,
        },
        "methods": benchmark.summarize(contenders, categories),
    }


def show(args: argparse.Namespace, outcome: dict[str, Any]) -> None:
    """The table for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    settings, machine = outcome["settings"], outcome["machine"]
    console = common.output_console(args)
    table = Table(
        title=f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, temperature "
        f"{settings['temperature']:g}, {settings['nodes']}-node tree, acceptance {settings['acceptance']}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("method", "tokens/s", "min-max", "tau", "x plain", "x generate", "same text"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for name, figures in outcome["methods"].items():
        rate = figures["tokens_per_second"]
        table.add_row(
            name,
            f"{rate['median']:.0f}",
            f"{rate['min']:.0f}-{rate['max']:.0f}",
            f"{figures['tau']:.2f}",
            f"{figures['speedup']:.2f}",
            f"{figures['speedup_vs_generate']:.2f}",
            f"{figures['equal_to_plain']:.0%}" if settings["temperature"] == 0 else "(sampled)",
        )
    console.print(table)
    for category, figures in outcome["methods"]["medusa"]["by_category"].items():
        console.print(f"  {category}: tau {figures['tau']:.2f}, {figures['speedup']:.2f} x plain")
    stages = outcome["methods"]["medusa"]["step_ms"]
    total = sum(stages.values()) or 1.0
    shares = ", ".join(f"{stage} {value / total:.0%}" for stage, value in stages.items())
    console.print(f"a step takes {total:.2f} ms: {shares}")
    console.print(
        f"{machine['gpu'] or machine['processor']}, {machine['threads']} thread(s), {machine['dtype']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )
    if settings["acceptance"] == "typical":
        console.print("acceptance 'typical' is lossy: this is not the backbone's own text")
