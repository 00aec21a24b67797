"""Compare all drafters: what each accepts on every kind of text, its speed, what it needs, and whether it is exact.

    python scripts/compare_drafters.py --prompts medusa/assets/prompts.jsonl --text stories.txt --threads 1 \\
        --on demo demo --on stories260K stories260K-heads --json drafters.json

`--on BACKBONE HEADS` is repeated for every backbone. Every round decodes all prompts plainly, by `model.generate`, by
its prompt lookup and assisted generation if our versions take part, and with each drafter, in turns, greedily. Speedups
are medians of the ratios within a round; on one thread CPU time counts, so that a busy machine does little harm. Exact:
texts equal to those of plain decoding, and draws by both forms of rejection that pass the chi-square tests of `medusa
verify`. `rest` looks things up in a datastore made of `--text`, which must not hold the continuations of the prompts. A
drafter that does not fit a backbone, such as a draft model of another vocabulary, is left out with its reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from decode.bench.benchmark import summarize
from decode.bench.losslessness.cases import p_values, passes, rules_for
from decode.bench.losslessness.experiment import Experiment
from decode.bench.machine import machine
from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.drafters import parse as parse_drafter
from decode.drafters.base import DrafterConfig, DrafterFactory
from decode.drafters.model import DraftModel
from decode.drafters.ngram import NgramConfig
from decode.settings import Settings
from measuring import Measured, MeasuringOptions, open_measured, show, take_turns
from medusa.__main__ import main as medusa
from medusa.commands.arguments import group, parse
from medusa.commands.models import open_drafter
from medusa.commands.options import Models
from medusa.errors import RequestError
from medusa.loading import Loaded
from medusa.options import REQUIRED, LoadOptions, count, option
from script_tools import markdown_table, run_script, script_parser

DRAFTERS = ["heads", "blockwise", "model:demo", "ngram", "rest", "lookahead", "mix:heads+ngram"]


@dataclass(frozen=True, kw_only=True)
class DraftersOptions(MeasuringOptions):
    """Options of this script."""

    models: Models = group(Models, "models", only=("tree",), backbone="")
    load: LoadOptions = group(LoadOptions, "loading", only=("dtype", "device", "attention"))
    settings: Settings = group(Settings, "generation", only=("max_new_tokens",), max_new_tokens=96, ignore_eos=True)
    on: tuple[tuple[str, str], ...] = option(
        REQUIRED, "measure on this backbone; repeatable", metavar=("BACKBONE", "HEADS"), nargs=2, action="append"
    )
    drafters: tuple[str, ...] = option(tuple(DRAFTERS), "rest alone: that of --text", metavar="NAME", nargs="+")
    text: str | None = option(None, "build the datastore of rest from this text", metavar="DATA")
    draws: int = count(100_000, "draw N times by each rule")
    sampled_prompts: int = count(2, "draw from the first N prompts")


class Entry(NamedTuple):
    """A drafter that takes part."""

    config: DrafterConfig
    source: DrafterFactory


def compare(options: DraftersOptions, folder: Path) -> dict[str, object]:
    """All drafters on one backbone; `folder`: where the datastore may go."""
    models, settings = open_measured(options), options.settings
    entries, left_out = open_drafters(options, models.loaded, settings, folder)
    rows = measure(options, models, entries, settings)
    for name, (config, source) in entries.items():
        rows[name] |= {"needs": config.needs, "megabytes": source.num_bytes / 1e6} | verify(options, models, source)
    table = {"backbone": models.loaded.name, "heads": options.models.heads}
    table |= {"prompts": len(models.prompts), "rounds": options.rounds}
    table |= {"max_new_tokens": settings.max_new_tokens, "draws": options.draws, "left_out": left_out, "rows": rows}
    title = f"{models.loaded.name}, {len(models.prompts)} prompts, {settings.max_new_tokens} greedy tokens"
    reasons = [f"{name} left out: {why}" for name, why in left_out.items()]
    show(options, title, speed_table(rows), price_table(rows), *reasons)
    return table


def open_drafters(
    options: DraftersOptions, loaded: Loaded, settings: Settings, folder: Path
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The drafters that fit this backbone, and why the others do not."""
    entries, left_out = {}, {}
    for name in options.drafters:
        if name == "rest":
            words = ["--backbone", loaded.name, "--data", str(options.text), "--output", str(folder), "--quiet"]
            medusa(["datastore", "build", *words])
        config = parse_drafter(f"rest:{folder}" if name == "rest" else name)
        try:
            config.check(loaded.model.config)
            entries[name] = Entry(config, open_drafter(options, loaded, config, settings))
        except RequestError as error:
            left_out[name] = str(error)
    return entries, left_out


def measure(
    options: DraftersOptions, models: Measured, entries: dict[str, Entry], settings: Settings
) -> dict[str, dict[str, object]]:
    """The figures of plain decoding, `model.generate` and all drafters, by name."""
    (model, tokenizer), prompts = (models.loaded.model, models.loaded.tokenizer), [[ids] for ids in models.prompts]
    methods = {"plain": plain_method(model, settings, tokenizer)} | stock_methods(models.loaded, entries, settings)
    for name, (_, source) in entries.items():
        methods[name] = medusa_method(model, source.heads, settings, tokenizer, drafter=source)
    contenders = take_turns(options, models.loaded, methods, prompts)
    figures = summarize(list(contenders.values()), models.categories)
    kept = ("tau", "speedup", "speedup_vs_generate", "equal_to_plain")
    return {
        name: {key: getattr(found, key) for key in kept}
        | {"tokens_per_second": found.tokens_per_second.median}
        | {"by_category": {kind: {"tau": of.tau, "speedup": of.speedup} for kind, of in found.by_category.items()}}
        for name, found in figures.items()
    }


def stock_methods(loaded: Loaded, entries: dict[str, Entry], settings: Settings) -> dict[str, Method]:
    """`model.generate`, and its own version of each drafter that it has: as many tokens ahead, and no heuristics."""
    found: dict[str, dict[str, object]] = {"transformers": {}}
    for name, (config, source) in entries.items():
        if isinstance(config, NgramConfig):
            ahead = {"prompt_lookup_num_tokens": config.tokens, "max_matching_ngram_size": config.n}
            found[f"transformers, {name}"] = ahead
        if isinstance(source, DraftModel) and not source.tree.is_dynamic:
            chosen = source.model.generation_config
            chosen.num_assistant_tokens, chosen.num_assistant_tokens_schedule = source.tree.max_depth, "constant"
            chosen.assistant_confidence_threshold = 0
            found[f"transformers, {name}"] = {"assistant_model": source.model}
    tokenizer = loaded.tokenizer
    return {name: transformers_method(loaded.model, settings, tokenizer, **more) for name, more in found.items()}


def verify(options: DraftersOptions, models: Measured, source: DrafterFactory) -> dict[str, object]:
    """Draw as `medusa verify` does: the smallest p-value of those judged, and whether all pass."""
    model, sampling, cases = models.loaded.model, Settings(temperature=1.0), []
    generator = torch.Generator(model.device).manual_seed(options.runtime.seed)
    for number, prompt in enumerate(models.prompts[: options.sampled_prompts]):
        experiment = Experiment(model, source, prompt, sampling, generator)
        rules = [rule for rule in rules_for(source) if rule.acceptance == "rejection"]
        cases += [experiment.run(rule, number, options.draws) for rule in rules]
    return {"smallest_p_value": min(p_values(cases)), "draws_pass": passes(cases)}


def speed_table(rows: dict[str, dict[str, object]]) -> str:
    """tau by category, and speeds."""
    categories, lines = list(rows["plain"]["by_category"]), []
    for name, row in rows.items():
        taus = [row["by_category"][category]["tau"] for category in categories] + [row["tau"]]
        # transformers does not report the steps of its assisted generation
        shown = [("" if name.startswith("transformers,") else f"{tau:.2f}") for tau in taus]
        speeds = [f"{row[key]:.2f}" for key in ("speedup", "speedup_vs_generate")]
        lines.append([name, *shown, f"{row['tokens_per_second']:.0f}", *speeds])
    return markdown_table(["drafter", *categories, "tau", "tokens/s", "x plain", "x generate"], lines)


def price_table(rows: dict[str, dict[str, object]]) -> str:
    """What a drafter needs, its memory without the backbone's, and whether it changes anything."""
    lines = []
    for name, row in rows.items():
        if "needs" in row:
            exact = "yes" if row["equal_to_plain"] == 1 and row["draws_pass"] else "NO"
            exact += f": {row['equal_to_plain']:.0%} of texts equal, smallest p-value {row['smallest_p_value']:.2g}"
            lines.append([name, row["needs"], exact, f"{row['megabytes']:.1f}"])
    return markdown_table(["drafter", "needs", "exact", "MB"], lines)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(DraftersOptions, script_parser(__doc__), argv)
    if "rest" in options.drafters and options.text is None:
        raise RequestError("the drafter rest needs --text; give one, or leave rest out of --drafters")
    tables = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (backbone, heads) in enumerate(options.on):
            models = replace(options.models, backbone=backbone, heads=heads)
            tables.append(compare(replace(options, models=models), Path(folder) / str(number)))
    options.output.write({"machine": asdict(machine()), "tables": tables})


if __name__ == "__main__":
    run_script(main)
