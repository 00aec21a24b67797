"""Compare drafters: tau on every category of prompts, speed, requirements, memory, and whether the text is exact.

    python scripts/compare_drafters.py --prompts demo --text stories.txt --threads 1 \\
        --on demo demo --on stories260K stories260K-heads --json drafters.json

Give `--on BACKBONE HEADS` once for each backbone. In each round, all methods decode all prompts greedily and in turns:
plain decoding, `model.generate`, its prompt lookup and assisted generation if our versions take part, and each drafter.
A speedup is the median of the ratios within the rounds. With one thread, CPU time is measured. A drafter is exact if
its texts equal those of plain decoding and its draws pass the chi-square tests of `medusa verify`. `rest` uses a
datastore made of `--text`, which must not contain the continuations of the prompts. A drafter that does not fit a
backbone, such as a draft model with another vocabulary, is left out, with the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from decode.bench.losslessness.cases import p_values, passes, rules_for
from decode.bench.losslessness.experiment import Experiment
from decode.bench.machine import machine
from decode.bench.methods import medusa_method, plain_method, transformers_method
from decode.drafters import parse as parse_drafter
from decode.drafters.base import DrafterConfig, DrafterFactory
from decode.drafters.layouts import DynamicTree
from decode.drafters.model import DraftModel
from decode.drafters.ngram import NgramConfig
from decode.settings import Settings
from measuring import MeasuringOptions, open_measured, show, take_turns, without_folder
from medusa.__main__ import main as medusa
from medusa.arguments import parse
from medusa.commands.models import Opened, open_drafter
from medusa.commands.options import Models
from medusa.errors import RequestError
from medusa.loading import Loaded
from medusa.options import REQUIRED, LoadOptions, count, group, option
from script_tools import markdown_table, run_script, script_parser

DRAFTERS = ("heads", "blockwise", "model:demo", "ngram", "rest", "lookahead", "mix:heads+ngram")


class DraftersOptions(MeasuringOptions):
    """Options of compare_drafters.py."""

    models: Models = group(Models, "models", only=("tree",), backbone="")
    load: LoadOptions = group(LoadOptions, "loading", only=("dtype", "device", "attention"))
    settings: Settings = group(Settings, "generation", only=("max_new_tokens",), max_new_tokens=96, ignore_eos=True)
    on: tuple[tuple[str, str], ...] = option(
        REQUIRED, "measure on this backbone; repeatable", metavar=("BACKBONE", "HEADS"), nargs=2, action="append"
    )
    drafters: tuple[str, ...] = option(DRAFTERS, "compare these drafters; rest needs --text", metavar="NAME", nargs="+")
    text: str | None = option(None, "build the datastore of rest from this text", metavar="DATA")
    draws: int = count(100_000, "sample N tokens with each rule")
    sampled_prompts: int = count(2, "sample after the first N prompts")


class Entry(NamedTuple):
    """A drafter that fits the backbone: its configuration, and the factory that makes it."""

    config: DrafterConfig
    source: DrafterFactory


def compare(options: DraftersOptions, folder: Path) -> dict[str, object]:
    """Compare all drafters on the backbone of `options.models`; `folder` is for the datastore of `rest`."""
    models, new_tokens = open_measured(options), options.settings.max_new_tokens
    entries, left_out = open_drafters(options, models.loaded, folder)
    rows = measure(options, models, entries)
    for name, (config, source) in entries.items():
        rows[name] |= {"needs": config.needs, "megabytes": source.num_bytes / 1e6} | verify(options, models, source)
    title = f"{models.loaded.name}, {len(models.prompts)} prompts, {new_tokens} greedy tokens"
    reasons = [f"{name} left out: {why}" for name, why in left_out.items()]
    show(options, title, *tables(rows), *reasons)
    heads = options.models.heads
    about = {"backbone": without_folder(models.loaded.name), "heads": heads and without_folder(heads)}
    about |= {"prompts": len(models.prompts), "rounds": options.rounds, "max_new_tokens": new_tokens}
    about |= {"draws": options.draws}
    return about | {"left_out": left_out, "rows": rows}


def open_drafters(options: DraftersOptions, loaded: Loaded, folder: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return the drafters that fit this backbone, and for each of the others the reason why it does not fit."""
    entries, left_out = {}, {}
    for name in options.drafters:
        if name == "rest":
            argv = ["--backbone", loaded.name, "--data", str(options.text), "--output", str(folder), "--quiet"]
            medusa(["datastore", "build", *argv])
        config = parse_drafter(f"rest:{folder}" if name == "rest" else name)
        try:
            config.check(loaded.model.config)
            entries[name] = Entry(config, open_drafter(options, loaded, config, options.settings))
        except RequestError as error:
            left_out[name] = str(error)
    return entries, left_out


def measure(options: DraftersOptions, models: Opened, entries: dict[str, Entry]) -> dict[str, dict[str, object]]:
    """Measure plain decoding, our drafters, and `model.generate` with and without its own; return figures by name."""
    (model, tokenizer), settings = (models.loaded.model, models.loaded.tokenizer), options.settings
    stock: dict[str, dict[str, object]] = {"transformers": {}}  # its versions of our drafters: as far, no heuristics
    for name, (config, source) in entries.items():
        if isinstance(config, NgramConfig):
            ahead = {"prompt_lookup_num_tokens": config.tokens, "max_matching_ngram_size": config.n}
            stock[f"transformers, {name}"] = ahead
        if isinstance(source, DraftModel) and not isinstance(source.tree, DynamicTree):
            chosen = source.model.generation_config
            chosen.num_assistant_tokens, chosen.num_assistant_tokens_schedule = source.tree.max_depth, "constant"
            chosen.assistant_confidence_threshold = 0
            stock[f"transformers, {name}"] = {"assistant_model": source.model}
    methods = {"plain": plain_method(model, settings, tokenizer)}
    methods |= {name: transformers_method(model, settings, tokenizer, **more) for name, more in stock.items()}
    for name, (_, source) in entries.items():
        methods[name] = medusa_method(model, source.heads, settings, tokenizer, drafter=source)
    kept = ("tau", "speedup", "speedup_vs_generate", "equal_to_plain")
    return {
        name: {key: getattr(found, key) for key in kept}
        | {"tokens_per_second": found.tokens_per_second.median}
        | {"by_category": {kind: {"tau": of.tau, "speedup": of.speedup} for kind, of in found.by_category.items()}}
        for name, found in take_turns(options, models, methods).items()
    }


def verify(options: DraftersOptions, models: Opened, source: DrafterFactory) -> dict[str, object]:
    """Test sampled tokens as `medusa verify` does; return the smallest p-value, and whether all tests pass."""
    model, sampling, cases = models.loaded.model, Settings(temperature=1.0), []
    generator = torch.Generator(model.device).manual_seed(options.runtime.seed)
    for number, prompt in enumerate(models.prompts[: options.sampled_prompts]):
        experiment = Experiment(model, source, prompt, sampling, generator)
        rules = [rule for rule in rules_for(source) if rule.acceptance == "rejection"]
        cases += [experiment.run(rule, number, options.draws) for rule in rules]
    return {"smallest_p_value": min(p_values(cases)), "draws_pass": passes(cases)}


def tables(rows: dict[str, dict[str, object]]) -> tuple[str, str]:
    """Tabulate each method's tau and speeds; and what a drafter requires, whether it is exact, and its memory."""
    categories, speeds, prices = list(rows["plain"]["by_category"]), [], []
    for name, row in rows.items():
        taus = [row["by_category"][category]["tau"] for category in categories] + [row["tau"]]
        # transformers does not report the steps of its assisted generation
        shown = [("" if name.startswith("transformers,") else f"{tau:.2f}") for tau in taus]
        ratios = [f"{row[key]:.2f}" for key in ("speedup", "speedup_vs_generate")]
        speeds.append([name, *shown, f"{row['tokens_per_second']:.0f}", *ratios])
        if "needs" in row:  # a drafter: its memory does not include the backbone's
            exact = "yes" if row["equal_to_plain"] == 1 and row["draws_pass"] else "NO"
            exact += f": {row['equal_to_plain']:.0%} of texts equal, smallest p-value {row['smallest_p_value']:.2g}"
            prices.append([name, row["needs"], exact, f"{row['megabytes']:.1f}"])
    head = ["drafter", *categories, "tau", "tokens/s", "x plain", "x generate"]
    return markdown_table(head, speeds), markdown_table(["drafter", "needs", "exact", "MB"], prices)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(DraftersOptions, script_parser(__doc__), argv)
    if "rest" in options.drafters and options.text is None:
        raise RequestError("the drafter rest needs --text; give one, or leave rest out of --drafters")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (backbone, heads) in enumerate(options.on):
            models = replace(options.models, backbone=backbone, heads=heads)
            found.append(compare(replace(options, models=models), Path(folder) / str(number)))
    options.output.write({"machine": asdict(machine()), "tables": found})


if __name__ == "__main__":
    run_script(main)
