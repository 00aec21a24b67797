"""Is `--tree auto` ever slower than plain decoding? Both, at several batch sizes, in pairs of runs on the same prompts.

    python scripts/measure_batches.py --backbone demo --heads demo --prompts prompts.jsonl --threads 1 --json out.json

For every batch size the tree is calibrated anew, on the backbone's own texts, as `auto` does. Then batches of the
prompts are decoded by our plain loop and with the tree, one after the other, each first in every second pair. The
figure is the median of the ratios of tokens per second, with a 95 % interval; speculation that loses is a median whose
whole interval lies below --limit, and exit status 1. On one thread its CPU time counts, so that a busy machine does no
harm.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict
from typing import Any

from rich.table import Table

from decode.bench.calibration.calibrate import calibrate, own_texts
from decode.bench.calibration.stored import Calibration
from decode.bench.chi2 import median_interval
from decode.bench.machine import machine
from decode.bench.methods import Method, medusa_method, plain_method
from decode.results import tau
from decode.settings import Settings
from decode.timers import stopwatch
from decode.tree_check import require_tree_forward
from medusa.commands import common
from medusa.heads.independent import MedusaHeads
from medusa.loading import Loaded
from medusa.records import prompt_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_backbone(parser)
    common.add_prompts(parser)
    parser.add_argument("--batch-sizes", type=common.positive, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    parser.add_argument("--pairs", type=common.positive, default=15, help="of runs for each size (default: 15)")
    parser.add_argument("--limit", type=float, default=0.97, help="of the ratio (default: 0.97)")
    common.add_machine(parser)
    args = parser.parse_args()
    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    heads = common.open_heads(args, loaded)
    require_tree_forward(loaded.model)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in common.read_prompts(args)]
    settings = Settings(max_new_tokens=args.max_new_tokens)
    texts = own_texts(loaded.model, settings, loaded.bos_token_id)
    rows = []
    for size in args.batch_sizes:
        found = calibrate(loaded.model, heads, texts, settings, size, rounds=2)
        rows.append({"batch_size": size} | compare(loaded, heads, found, settings, prompts, args.pairs))
        common.console(args).print(rows[-1])
    show(args, rows)
    about = {"backbone": args.backbone, "heads": args.heads, "dtype": str(loaded.model.dtype).removeprefix("torch.")}
    common.write_results(args, {"machine": asdict(machine()), "settings": settings.to_dict() | about, "rows": rows})
    sys.exit(any(row["interval"][1] < args.limit for row in rows))


def compare(
    loaded: Loaded,
    heads: MedusaHeads,
    found: Calibration,
    settings: Settings,
    prompts: list[list[int]],
    pairs: int,
) -> dict[str, Any]:
    """Decode batches of prompts both ways, in turns, after one pair that warms up."""
    size, tree = int(str(found.holds_for["batch_size"])), found.tree
    methods = {
        "plain": plain_method(loaded.model, settings),
        "auto": medusa_method(loaded.model, heads, settings, tree=tree),
    }
    rates: dict[str, list[float]] = {"plain": [], "auto": []}
    equal, taus = 0, []
    for number in range(pairs + 1):
        batch = [prompts[(number * size + row) % len(prompts)] for row in range(size)]
        order = ["plain", "auto"] if number % 2 else ["auto", "plain"]
        outcome = {name: run(methods[name], batch, loaded) for name in order}
        if not number:
            continue
        for name, (rate, _) in outcome.items():
            rates[name].append(rate)
        equal += sum(a.new_ids == b.new_ids for a, b in zip(outcome["plain"][1], outcome["auto"][1], strict=True))
        taus.append(tau(outcome["auto"][1]))
    ratios = [ours / theirs for ours, theirs in zip(rates["auto"], rates["plain"], strict=True)]
    best = found.best
    return {
        "nodes": best.nodes,
        "dynamic": best.dynamic,
        "foretold": best.tokens_per_second / found.points[0].tokens_per_second,
        "tau": statistics.fmean(taus),
        "plain_tokens_per_second": statistics.median(rates["plain"]),
        "tokens_per_second": statistics.median(rates["auto"]),
        "ratio": statistics.median(ratios),
        "interval": list(median_interval(ratios)),
        "pairs": pairs,
        "equal_to_plain": equal / (pairs * size),
    }


def run(method: Method, batch: list[list[int]], loaded: Loaded) -> tuple[float, list[Any]]:
    """Tokens per second, the prefill included, and the texts."""
    clock = stopwatch(loaded.model.device)
    start = clock()
    results = method(batch)
    return sum(len(result.new_ids) for result in results) / (clock() - start), results


def show(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    table = Table("batch", "tree", "tau", "plain tokens/s", "tokens/s", "ratio", "95 % interval", "predicted")
    for row in rows:
        kind = "plain" if row["nodes"] == 1 else f"{'dynamic, ' if row['dynamic'] else ''}{row['nodes']} nodes"
        table.add_row(
            str(row["batch_size"]),
            kind,
            f"{row['tau']:.2f}",
            f"{row['plain_tokens_per_second']:.0f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['ratio']:.2f}",
            "{:.2f} to {:.2f}".format(*row["interval"]),
            f"{row['foretold']:.2f}",
        )
    common.output_console(args).print(table)


if __name__ == "__main__":
    main()
