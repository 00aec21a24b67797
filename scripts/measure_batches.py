"""Check whether `--tree auto` is ever slower than plain decoding, at several batch sizes, in pairs of runs.

    python scripts/measure_batches.py --backbone demo --heads demo --prompts prompts.jsonl --threads 1 --json out.json

For every batch size the tree is calibrated again, on the backbone's own texts, as `auto` does. Then batches of the
prompts are decoded by our plain loop and with the tree, in turns. The figure is the median of the ratios of tokens per
second, with a 95 % interval. Exit status 1 if an interval lies below --limit: there, speculation loses. On one thread
its CPU time counts, so that a busy machine does no harm.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, islice

from rich.table import Table

from decode.bench.benchmark import Contender
from decode.bench.calibration.calibrate import calibrate, own_texts
from decode.bench.calibration.stored import Calibration
from decode.bench.chi2 import median_interval
from decode.bench.machine import machine
from decode.bench.methods import medusa_method, plain_method
from decode.results import tau
from decode.settings import Settings
from measuring import open_models, take_turns
from medusa.commands import common
from script_tools import plain_table, run_script, script_parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    common.add_backbone(parser)
    common.add_prompts(parser)
    parser.add_argument("--batch-sizes", type=common.positive, nargs="+", default=[1, 2, 4, 8, 16], metavar="N")
    parser.add_argument("--max-new-tokens", type=common.positive, default=128)
    parser.add_argument("--pairs", type=common.positive, default=15, help="of runs for each size (default: 15)")
    parser.add_argument("--limit", type=float, default=0.97, help="of the ratio (default: 0.97)")
    common.add_machine(parser)
    args = parser.parse_args(argv)
    models, settings = open_models(args), Settings(max_new_tokens=args.max_new_tokens)
    model, heads = models.loaded.model, common.open_heads(args, models.loaded)
    texts = own_texts(model, settings, models.loaded.bos_token_id)
    rows = []
    for size in args.batch_sizes:
        found = calibrate(model, heads, texts, settings, size, rounds=2)
        prompts = cycle(models.prompts)
        batches = [list(islice(prompts, size)) for _ in range(args.pairs)]
        methods = {"plain": plain_method(model, settings)}
        methods["auto"] = medusa_method(model, heads, settings, tree=found.tree)
        contenders = take_turns(args, models.loaded, methods, batches, rounds=1)
        rows.append({"batch_size": size} | about_tree(found) | compare(contenders, size))
    common.output_console(args).print(table_of(rows))
    about = {"backbone": args.backbone, "heads": args.heads, "dtype": str(model.dtype).removeprefix("torch.")}
    common.write_results(args, {"machine": asdict(machine()), "settings": settings.to_dict() | about, "rows": rows})
    return int(any(row["interval"][1] < args.limit for row in rows))


def about_tree(found: Calibration) -> dict[str, object]:
    """The tree that calibration chose, and the speedup that it predicts."""
    best = found.points[found.chosen]
    predicted = best.tokens_per_second / found.points[0].tokens_per_second
    return {"nodes": best.nodes, "dynamic": best.dynamic, "foretold": predicted}


def compare(contenders: dict[str, Contender], size: int) -> dict[str, object]:
    """Speeds and their ratios, a pair for each batch of `size` prompts."""
    batches = {name: common.batches(contender.rounds[0], size) for name, contender in contenders.items()}
    rates = {
        name: [sum(len(r.new_ids) for r in batch) / sum(r.seconds for r in batch) for batch in mine]
        for name, mine in batches.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(rates["auto"], rates["plain"], strict=True)]
    results, plain = contenders["auto"].rounds[0], contenders["plain"].rounds[0]
    return {
        "tau": statistics.fmean(tau(batch) for batch in batches["auto"]),
        "plain_tokens_per_second": statistics.median(rates["plain"]),
        "tokens_per_second": statistics.median(rates["auto"]),
        "ratio": statistics.median(ratios),
        "interval": list(median_interval(ratios)),
        "pairs": len(ratios),
        "equal_to_plain": sum(a.new_ids == b.new_ids for a, b in zip(results, plain, strict=True)) / len(results),
    }


def table_of(rows: Sequence[dict[str, object]]) -> Table:
    """The rows for people."""
    head = ["batch", "tree", "tau", "plain tokens/s", "tokens/s", "ratio", "95 % interval", "predicted"]
    table = plain_table("", head, words=2)
    for row in rows:
        kind = "plain" if row["nodes"] == 1 else f"{'dynamic, ' if row['dynamic'] else ''}{row['nodes']} nodes"
        speeds = [f"{row[name]:.0f}" for name in ("plain_tokens_per_second", "tokens_per_second")]
        span = "{:.2f} to {:.2f}".format(*row["interval"])
        ratio, predicted = f"{row['ratio']:.2f}", f"{row['foretold']:.2f}"
        table.add_row(str(row["batch_size"]), kind, f"{row['tau']:.2f}", *speeds, ratio, span, predicted)
    return table


if __name__ == "__main__":
    run_script(main)
