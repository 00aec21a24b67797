"""Is tau what calibration predicts? Static and dynamic trees of many sizes, on prompts that took no part in it.

    python scripts/check_calibration.py --backbone demo --heads demo --calibrate-on openings.jsonl \\
        --prompts held_out.jsonl

The backbone continues the first prompts greedily; from that trees are grown and confidences fitted, as by `medusa
calibrate`, and tau is predicted. Then every tree decodes the held-out prompts. Counts only, no times: any machine will
do.

With `--speed N` the trees decode the held-out prompts one by one instead, taking turns, N times, and tokens per second
are compared with the tree that calibration picks (on one thread in CPU time).
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict

import torch
from rich.table import Table
from transformers import PreTrainedModel

from decode.bench.calibration.calibrate import calibrate
from decode.bench.calibration.grow import grow, predicted_tau, predicted_tau_held_out
from decode.bench.calibration.recording import Recording, record
from decode.bench.methods import medusa_method, plain_method
from decode.drafters.dynamic_tree import DynamicTree, Layout
from decode.results import Result, tau
from decode.settings import Settings
from decode.timers import stopwatch
from medusa.backbone import Backbone
from medusa.commands import common
from medusa.heads.independent import MedusaHeads
from medusa.records import prompt_ids, read_records
from medusa.tree import Tree

AT_ONCE = 16  # prompts in a batch; the texts and the steps are what they would be alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_backbone(parser)
    common.add_prompts(parser)
    parser.add_argument("--calibrate-on", required=True, metavar="FILE", help="other prompts than --prompts")
    parser.add_argument(
        "--calibration-prompts", type=common.positive, default=200, metavar="N", help="how many of them"
    )
    parser.add_argument("--nodes", type=common.positive, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    parser.add_argument("--speed", type=common.positive, metavar="N", help="compare speeds, in N rounds")
    common.add_machine(parser)
    args = parser.parse_args()
    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    heads = common.open_heads(args, loaded)
    settings = Settings(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    others = [prompt_ids(r, loaded.tokenizer) for r in read_records(args.calibrate_on)][: args.calibration_prompts]
    held_out = [(r.category, prompt_ids(r, loaded.tokenizer)) for r in common.read_prompts(args)]
    plain = plain_method(loaded.model, settings)
    with torch.inference_mode():
        texts = [(r.input_ids, r.new_ids) for part in common.batches(others, AT_ONCE) for r in plain(part)]
        recording = record(Backbone(loaded.model), heads, texts)
    temperatures = recording.fit_temperatures()
    if args.speed:
        picked = calibrate(loaded.model, heads, texts, settings).tree
        compare_speeds(args, loaded.model, heads, settings, picked, recording, [ids for _, ids in held_out])
        return
    rows = []
    for nodes in args.nodes:
        static = grow(recording, nodes)
        dynamic = DynamicTree.over_heads(nodes, heads.config.num_heads, temperatures)
        trees: list[tuple[str, Layout, float]] = [
            ("static", static, predicted_tau_held_out(nodes, recording)),
            ("dynamic", dynamic, predicted_tau(dynamic, recording)),
        ]
        for kind, tree, predicted in trees:
            decode = medusa_method(loaded.model, heads, settings, tree=tree)
            results = [r for part in common.batches([ids for _, ids in held_out], AT_ONCE) for r in decode(part)]
            by_category: dict[str, list[Result]] = defaultdict(list)
            for (category, _), result in zip(held_out, results, strict=True):
                by_category[category or "all"].append(result)
            rows.append(
                {
                    "nodes": nodes,
                    "tree": kind,
                    "foretold": predicted,
                    "measured": tau(results),
                    "by_category": {name: tau(found) for name, found in by_category.items()},
                }
            )
            common.console(args).print(rows[-1])
    show(args, rows)
    about = {"temperatures": temperatures, "calibration_prompts": len(others), "prompts": len(held_out)}
    common.write_results(args, about | {"rows": rows})


def compare_speeds(
    args: argparse.Namespace,
    model: PreTrainedModel,
    heads: MedusaHeads,
    settings: Settings,
    picked: Layout,
    recording: Recording,
    prompts: list[list[int]],
) -> None:
    """Tokens per second of every tree, and of the one that calibration picked against the best of them."""
    temperatures, most = recording.fit_temperatures(), heads.config.num_heads
    trees: dict[str, Layout] = {"picked": picked, "plain": Tree.chain(0)}
    for nodes in args.nodes:
        trees[f"static {nodes}"] = grow(recording, nodes)
        trees[f"dynamic {nodes}"] = DynamicTree.over_heads(nodes, most, temperatures)
    methods = {name: medusa_method(model, heads, settings, tree=tree) for name, tree in trees.items()}
    clock = stopwatch(model.device)
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    tokens: dict[str, int] = {}
    for number in range(args.speed + 1):
        order = list(methods)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            start = clock()
            tokens[name] = sum(len(result.new_ids) for ids in prompts for result in methods[name]([ids]))
            if number:  # the first round warms up
                seconds[name].append(clock() - start)
    speeds = {name: tokens[name] / statistics.median(found) for name, found in seconds.items()}
    table = Table("tree", "tokens/s", "of the picked one")
    for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{speed:.0f}", f"{speed / speeds['picked']:.3f}")
    common.output_console(args).print(table)
    kind = f"{'dynamic' if isinstance(picked, DynamicTree) else 'static'} {picked.num_nodes}"
    common.write_results(args, {"picked": kind, "tokens_per_second": speeds, "rounds": args.speed})


def show(args: argparse.Namespace, rows: list[dict[str, object]]) -> None:
    table = Table("nodes", "tree", "predicted", "measured", "predicted / measured")
    for row in rows:
        predicted, measured = float(str(row["foretold"])), float(str(row["measured"]))
        table.add_row(
            str(row["nodes"]), str(row["tree"]), f"{predicted:.3f}", f"{measured:.3f}", f"{predicted / measured:.3f}"
        )
    common.output_console(args).print(table)


if __name__ == "__main__":
    main()
