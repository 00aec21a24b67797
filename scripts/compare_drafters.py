"""The table of all drafters: what each accepts on every kind of text, what it writes a second, holds and needs, and
whether its texts and draws are the backbone's own.

    python scripts/compare_drafters.py --prompts medusa/assets/prompts.jsonl --text stories.txt --threads 1 \\
        --on demo demo --on stories260K stories260K-heads --json drafters.json

`--on BACKBONE HEADS` is repeated for every backbone. Every round decodes all prompts plainly, by `model.generate`, by
its prompt lookup and assisted generation where ours take part, and with each drafter, in turns, greedily; speedups are
medians of the ratios within a round, and on one thread CPU time counts, so that a busy machine does little harm. Exact:
texts equal to plain decoding's, and draws by both forms of rejection that chi-square tests let pass (as
`medusa verify`). `rest` looks things up in a datastore made here of `--text`, which must not hold the prompts' own
continuations; a drafter that does not fit a backbone (a draft model of another vocabulary) is left out there, and said
so.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table

from decode.bench import benchmark
from decode.bench.losslessness.cases import p_values, passes, rules_for
from decode.bench.losslessness.experiment import Experiment
from decode.bench.machine import machine
from decode.bench.methods import medusa_method, plain_method, transformers_method
from decode.draft import DrafterConfig, DrafterFactory
from decode.drafters import parse
from decode.drafters.model import DraftModel
from decode.drafters.ngram import NgramConfig
from decode.settings import Settings
from decode.timers import stopwatch
from medusa.commands import common, datastore
from medusa.errors import RequestError
from medusa.loading import Loaded
from medusa.records import Record, prompt_ids
from medusa.tree import Tree

WIDTH = 112  # letters, which the wider table takes; a narrow terminal breaks lines, and no figure is cut off
DRAFTERS = ["heads", "blockwise", "model:demo", "ngram", "rest", "lookahead", "mix:heads+ngram"]


@dataclass
class Entry:
    """A drafter that takes part."""

    name: str
    plan: DrafterConfig
    source: DrafterFactory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs=2, action="append", required=True, metavar=("BACKBONE", "HEADS"))
    common.add_prompts(parser)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, metavar="NAME", help="`rest` alone: that of --text")
    parser.add_argument("--text", metavar="DATA", help="what the datastore of rest is made of")
    parser.add_argument("--tree", metavar="FILE|NAME", help="of the heads, as for medusa generate")
    parser.add_argument("--max-new-tokens", type=common.positive, default=96)
    parser.add_argument("--rounds", type=common.positive, default=3, help="(default: 3)")
    parser.add_argument("--draws", type=common.positive, default=100_000, help="of each rule (default: 100,000)")
    parser.add_argument("--sampled-prompts", type=common.positive, default=2, help="drawn from (default: the first 2)")
    common.add_machine(parser)
    args = parser.parse_args()
    if "rest" in args.drafters and args.text is None:
        parser.error("rest needs --text, or leave it out of --drafters")
    common.prepare_machine(args)
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (backbone, heads) in enumerate(args.on):
            own = argparse.Namespace(**vars(args) | {"backbone": backbone, "heads": heads, "compile": False})
            own.batch_size, own.stop_drafting, own.revision, own.trust_remote_code = 1, 0.0, None, False
            tables.append(compare(own, Path(folder) / str(number)))
    common.write_results(args, {"machine": asdict(machine()), "tables": tables})


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All drafters on one backbone; `folder`: where its datastore may go."""
    loaded = common.open_backbone(args)
    records = common.read_prompts(args)
    settings = Settings(max_new_tokens=args.max_new_tokens, ignore_eos=True)
    entries, left_out = opened(args, loaded, settings, folder)
    rows = measured(args, loaded, entries, records, settings)
    for entry in entries:
        rows[entry.name] |= {"needs": entry.plan.needs, "megabytes": entry.source.num_bytes / 1e6}
        rows[entry.name] |= verified(args, loaded, entry, records)
    table = {"backbone": args.backbone, "heads": args.heads, "prompts": len(records), "rounds": args.rounds}
    table |= {"max_new_tokens": args.max_new_tokens, "draws": args.draws, "left_out": left_out, "rows": rows}
    show(args, table)
    return table


def opened(
    args: argparse.Namespace, loaded: Loaded, settings: Settings, folder: Path
) -> tuple[list[Entry], dict[str, str]]:
    """Those that fit this backbone; of the others, why not."""
    entries, left_out = [], {}
    for name in args.drafters:
        spec = name
        if name == "rest":
            build_datastore(args, folder)
            spec = f"rest:{folder}"
        plan = parse(spec)
        try:
            plan.check(loaded.model.config)
            entries.append(Entry(name, plan, common.open_source(args, loaded, plan, settings)))
        except RequestError as error:
            left_out[name] = str(error)
    return entries, left_out


def build_datastore(args: argparse.Namespace, folder: Path) -> None:
    """By the command that users have."""
    parser = argparse.ArgumentParser()
    datastore.add_arguments(parser)
    words = ["build", "--backbone", args.backbone, "--data", args.text, "--output", str(folder), "--quiet"]
    datastore.run(parser.parse_args(words))


def measured(
    args: argparse.Namespace, loaded: Loaded, entries: list[Entry], records: list[Record], settings: Settings
) -> dict[str, dict[str, Any]]:
    """Plain decoding, `model.generate` and all drafters in turns."""
    model, tokenizer = loaded.model, loaded.tokenizer
    prompts = [[prompt_ids(record, tokenizer)] for record in records]
    contenders = [
        benchmark.Contender("plain", plain_method(model, settings, tokenizer)),
        *theirs(loaded, entries, settings),
        *(
            benchmark.Contender(
                entry.name, medusa_method(model, entry.source.heads, settings, tokenizer, drafter=entry.source)
            )
            for entry in entries
        ),
    ]
    with Progress(console=common.console(args), disable=args.quiet, transient=True) as progress:
        task = progress.add_task(args.backbone, total=args.rounds * len(prompts))
        turn = partial(progress.advance, task)
        benchmark.run_rounds(contenders, prompts, args.rounds, turn, args.seed, stopwatch(model.device))
    figures = benchmark.summarize(contenders, [record.category for record in records])
    kept = ("tau", "speedup", "speedup_vs_generate", "equal_to_plain")
    return {
        name: {key: getattr(found, key) for key in kept}
        | {"tokens_per_second": found.tokens_per_second.median}
        | {"by_category": {kind: {"tau": of.tau, "speedup": of.speedup} for kind, of in found.by_category.items()}}
        for name, found in figures.items()
    }


def theirs(loaded: Loaded, entries: list[Entry], settings: Settings) -> list[benchmark.Contender]:
    """`model.generate`, and its own version of each drafter that it has: as many tokens ahead, and no heuristics."""
    model, found = loaded.model, dict[str, dict[str, Any]](transformers={})
    for entry in entries:
        if isinstance(entry.plan, NgramConfig):
            ahead = {"prompt_lookup_num_tokens": entry.plan.tokens, "max_matching_ngram_size": entry.plan.n}
            found[f"transformers, {entry.name}"] = ahead
        if isinstance(entry.source, DraftModel) and isinstance(entry.source.tree, Tree):
            chosen = entry.source.model.generation_config
            chosen.num_assistant_tokens, chosen.num_assistant_tokens_schedule = entry.source.tree.max_depth, "constant"
            chosen.assistant_confidence_threshold = 0
            found[f"transformers, {entry.name}"] = {"assistant_model": entry.source.model}
    return [
        benchmark.Contender(name, transformers_method(model, settings, loaded.tokenizer, **assistance))
        for name, assistance in found.items()
    ]


def verified(args: argparse.Namespace, loaded: Loaded, entry: Entry, records: list[Record]) -> dict[str, Any]:
    """The draws of `medusa verify`: the smallest p-value of those judged, and whether all pass."""
    generator = torch.Generator(loaded.model.device).manual_seed(args.seed)
    cases = []
    for number, record in enumerate(records[: args.sampled_prompts]):
        prompt = prompt_ids(record, loaded.tokenizer)
        sampling = Settings(temperature=1.0)
        experiment = Experiment(loaded.model, entry.source, prompt, sampling, generator)
        rules = [rule for rule in rules_for(entry.source) if rule.acceptance == "rejection"]
        cases += [experiment.run(rule, number, args.draws) for rule in rules]
    return {"smallest_p_value": min(p_values(cases)), "draws_pass": passes(cases)}


def show(args: argparse.Namespace, table: dict[str, Any]) -> None:
    console, rows = common.output_console(args), table["rows"]
    console.width = max(console.width, WIDTH)
    kinds = list(rows["plain"]["by_category"])
    speed = plain_table(f"{args.backbone}, {table['prompts']} prompts, {args.max_new_tokens} greedy tokens", "drafter")
    for head in [*kinds, "tau", "tokens/s", "x plain", "x generate"]:
        speed.add_column(head, justify="right", no_wrap=True)
    price = plain_table(
        "what it holds beside the backbone and needs beforehand; whether it changes anything", "drafter"
    )
    for head in ("MB", "needs", "exact"):
        price.add_column(head, justify="right" if head == "MB" else "left", no_wrap=True)
    for name, row in rows.items():
        speed.add_row(
            name,
            *("" if is_theirs(name) else f"{row['by_category'][kind]['tau']:.2f}" for kind in kinds),
            "" if is_theirs(name) else f"{row['tau']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}",
            f"{row['speedup_vs_generate']:.2f}",
        )
        if "needs" in row:
            price.add_row(name, f"{row['megabytes']:.1f}", row["needs"], in_words(row))
    console.print(speed, price)
    for name, why in table["left_out"].items():
        console.print(f"{name} left out: {why}", highlight=False)


def is_theirs(name: str) -> bool:
    """Transformers does not tell its steps."""
    return name.startswith("transformers,")


def plain_table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    return table


def in_words(row: dict[str, Any]) -> str:
    exact = row["equal_to_plain"] == 1 and row["draws_pass"]
    texts = f"{row['equal_to_plain']:.0%} of texts equal"
    return f"{'yes' if exact else 'NO'}: {texts}, smallest p-value {row['smallest_p_value']:.2g}"


if __name__ == "__main__":
    main()
