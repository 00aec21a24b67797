"""Measure the speedup: plain decoding, `model.generate` and heads take turns on the same prompts.

medusa benchmark --backbone demo --heads demo --prompts prompts.jsonl --report report.html
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --tree topk:3,2 --json b.json
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --drafter heads --drafter ngram
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --compare b.json
medusa benchmark --compare a.json b.json --report compared.html
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa import __version__
from medusa.commands import common
from medusa.errors import RequestError

if TYPE_CHECKING:
    from decode.bench.benchmark import Contender
    from decode.bench.compare import Comparison
    from decode.draft import DrafterFactory
    from decode.settings import Settings
    from medusa.loading import Loaded, LoadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False, backbone_required=False)
    common.add_prompts(parser)
    common.add_generation(parser, max_new_tokens=128)
    common.add_drafter(parser, several=True)
    common.add_amateur(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument("--rounds", type=common.positive, default=3, metavar="N", help="default: %(default)s")
    group.add_argument("--prompt-lookup", action="store_true", help="also model.generate with prompt lookup")
    group.add_argument("--draft-model", metavar="B", help="also model.generate with this assistant; demo is shipped")
    group.add_argument(
        "--temperatures", type=temperatures, default=[], metavar="T,T,...", help="also tau and speedup at each of these"
    )
    group.add_argument(
        "--lossy", action="store_true", help="also the lossy rules, with the likelihood of what they write"
    )
    group = parser.add_argument_group("report")
    group.add_argument("--report", metavar="FILE.html|DIR", help="a page; in a folder also PNGs and JSON")
    group.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="OLD.json",
        help="with earlier runs on the same prompts; without --backbone, the first file with the others",
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing report")
    common.add_machine(parser)


def temperatures(text: str) -> list[float]:
    """`0,0.5,1`, for argparse."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of temperatures such as 0,0.5,1")
    return values


def run(args: argparse.Namespace) -> None:
    for path in (args.json, args.report):
        if path != args.report or is_page(path):
            common.check_output(path)
    if args.report:
        from medusa.files import require_absent

        require_absent(Path(args.report), args.overwrite)
    earlier = [(name, read_benchmark(name)) for name in args.compare]
    if args.backbone is None and earlier:
        comparisons, outcome = compare_files(args, earlier), None
    else:
        comparisons, outcome = run_and_compare(args, earlier)
    for comparison in comparisons:
        show_comparison(args, comparison)
    written = outcome or {"comparisons": []}
    if comparisons:
        written = written | {"comparisons": [comparison.to_dict() for comparison in comparisons]}
    common.write_results(args, written)
    if args.report:
        write_report(Path(args.report), written)


def is_page(path: str | None) -> bool:
    return path is not None and Path(path).suffix in (".html", ".htm")


def read_benchmark(name: str) -> dict[str, Any]:
    """An earlier run's JSON, checked before anything is measured."""
    from medusa.files import read_json

    content = read_json(Path(name))
    if not isinstance(content, dict) or "prompts_sha256" not in content.get("settings", {}):
        from decode.bench.compare import require_benchmark

        require_benchmark(content, name)
    return content


def compare_files(args: argparse.Namespace, earlier: list[tuple[str, dict[str, Any]]]) -> list[Comparison]:
    from decode.bench.compare import compare

    if len(earlier) < 2:
        raise RequestError(
            f"--compare {args.compare[0]} alone has nothing to be compared with; give a second file, or "
            "--backbone B --heads H --prompts P to measure now"
        )
    (first, base), *others = earlier
    return [compare(base, content, (first, name)) for name, content in others]


def run_and_compare(
    args: argparse.Namespace, earlier: list[tuple[str, dict[str, Any]]]
) -> tuple[list[Comparison], dict[str, Any]]:
    specs: list[str | None] = args.drafter or [None]
    for option in ("backbone", "heads") if specs == [None] else ("backbone",):
        if getattr(args, option) is None:
            raise RequestError(f"--{option} is missing; give it, or two files to --compare")
    if len(set(specs)) < len(specs):
        raise RequestError(f"--drafter {' --drafter '.join(map(str, specs))}: one is given twice")
    plans = [common.plan_of(args, spec, alone=len(specs) == 1) for spec in specs]
    settings = common.settings_of(args)
    common.contrast_of(args)
    if args.amateur and (args.prompt_lookup or args.draft_model):
        raise RequestError(
            "transformers' assisted generation knows no --amateur; leave out --prompt-lookup and --draft-model"
        )
    records = common.read_prompts(args)
    if args.batch_size > 1 and (args.prompt_lookup or args.draft_model):
        raise RequestError(
            f"transformers' assisted generation takes one prompt at a time, and --batch-size is {args.batch_size}; "
            "leave out --prompt-lookup and --draft-model, or take --batch-size 1"
        )
    common.check_models(args, *plans)

    from decode.bench.compare import compare
    from medusa.records import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    common.hint_at_bfloat16(args, loaded)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    settings = common.with_amateur(args, loaded, settings)
    common.require_fitting(prompts, loaded, settings.amateur)
    for name, content in earlier:
        if content["settings"]["prompts_sha256"] != prompts_hash(prompts):
            raise RequestError(f"{name} was measured on other prompts, so nothing can be paired; give it the same ones")
    others = assisted(args, loaded, settings)
    source, *rest = [common.open_source(args, loaded, plan, settings) for plan in plans]
    others += [drafting(str(spec), other, loaded, settings) for spec, other in zip(specs[1:], rest, strict=True)]
    outcome = measure(
        args, loaded, source, settings, prompts, [record.category for record in records], args.rounds, others
    )
    if args.temperatures:
        outcome["temperatures"] = [
            at_temperature(args, loaded, source, settings, prompts, temperature) for temperature in args.temperatures
        ]
    if args.lossy:
        outcome["lossy"] = lossy(args, loaded, source, settings, prompts)
    if args.report and source.heads is not None:
        outcome["methods"]["medusa"] |= looked_into(args, loaded, source, settings, prompts)
    show(args, outcome)
    figures = outcome["methods"]["medusa"]
    if source.heads is not None:
        common.warn_if_useless(figures["new_tokens"], figures["tau"])
    return [compare(content, outcome, (name, "this run")) for name, content in earlier], outcome


def measure(
    args: argparse.Namespace,
    loaded: Loaded,
    source: DrafterFactory,
    settings: Settings,
    prompts: list[list[int]],
    categories: list[str | None],
    rounds: int,
    others: list[Contender] | None = None,
) -> dict[str, Any]:
    """Take turns, and sum up: what `--json` writes. `others`: further methods that take part."""
    import torch

    from decode.bench import benchmark
    from decode.bench.methods import medusa_method, plain_method, transformers_method
    from decode.timers import StageTimer
    from medusa.backbone import require_tree_support
    from medusa.heads.independent import bytes_of
    from medusa.memory import peak_memory

    require_tree_support(loaded.model)
    if settings.stop and loaded.tokenizer is None:
        raise RequestError("--stop needs a tokenizer, and this backbone has none")
    wait = torch.cuda.synchronize if loaded.model.device.type == "cuda" else None
    clocks = {name: StageTimer(wait) for name in ("plain", "medusa")}
    model, tokenizer = loaded.model, loaded.tokenizer
    contenders = [
        benchmark.Contender("plain", plain_method(model, settings, tokenizer, clocks["plain"]), clocks["plain"]),
        benchmark.Contender("transformers", transformers_method(model, settings, tokenizer)),
        *(others or []),
        benchmark.Contender(
            "medusa",
            medusa_method(model, source.heads, settings, tokenizer, clock=clocks["medusa"], drafter=source),
            clocks["medusa"],
        ),
    ]
    take_turns(args, contenders, prompts, rounds, "measuring")
    memory = {"backbone": bytes_of(model), "heads": source.num_bytes, "peak": peak_memory()}
    return {
        "machine": benchmark.machine()
        | {"dtype": str(model.dtype).removeprefix("torch."), "memory": memory, "medusa": __version__},
        "settings": settings.to_dict()
        | {
            "backbone": args.backbone,
            "heads": args.heads,
            **common.drafter_json((getattr(args, "drafter", None) or [None])[0], source),
            "prompts": len(prompts),
            "prompts_sha256": prompts_hash(prompts),
            "rounds": rounds,
            "batch_size": args.batch_size,
            "seed": args.seed,
            "command": shlex.join(["medusa", *getattr(args, "words", [])]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": commit(),
        },
        "methods": benchmark.summarize(contenders, categories),
    }


def take_turns(
    args: argparse.Namespace, contenders: list[Contender], prompts: list[list[int]], rounds: int, what: str
) -> None:
    """`benchmark.run_rounds` with a bar of progress."""
    from rich.progress import Progress

    from decode.bench import benchmark

    batches = common.batches(prompts, args.batch_size)
    with Progress(console=common.console(args), disable=args.quiet, transient=True) as progress:
        task = progress.add_task(what, total=rounds * len(batches))
        benchmark.run_rounds(contenders, batches, rounds, lambda: progress.advance(task), args.seed)


def prompts_hash(prompts: list[list[int]]) -> str:
    """By which two runs know that they decoded the same."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def commit() -> str | None:
    """Of the checkout that this runs from, if it is one."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def assisted(args: argparse.Namespace, loaded: Loaded, settings: Settings) -> list[Contender]:
    """The other ways to guess ahead that `model.generate` has."""
    from decode.bench.benchmark import Contender
    from decode.bench.methods import transformers_method
    from medusa.files import ASSETS
    from medusa.loading import load_backbone

    found = []
    if args.prompt_lookup:
        found.append(
            Contender(
                "prompt lookup",
                transformers_method(loaded.model, settings, loaded.tokenizer, prompt_lookup_num_tokens=10),
            )
        )
    if args.draft_model:
        name = args.draft_model
        path = str(ASSETS / "draft") if name == "demo" else name
        dtype, device = str(loaded.model.dtype).removeprefix("torch."), str(loaded.model.device)
        options = LoadOptions(dtype, device, trust_remote_code=args.trust_remote_code)
        draft = load_backbone(path, options).model
        theirs, ours = (m.config.get_text_config(decoder=True).vocab_size for m in (draft, loaded.model))
        if theirs != ours:
            raise RequestError(
                f"the draft model {name} has {theirs} tokens and the backbone {ours}; give one of the same vocabulary"
            )
        found.append(
            Contender(
                "draft model", transformers_method(loaded.model, settings, loaded.tokenizer, assistant_model=draft)
            )
        )
    return found


def drafting(spec: str, source: DrafterFactory, loaded: Loaded, settings: Settings) -> Contender:
    """A further drafter that takes part."""
    from decode.bench.benchmark import Contender
    from decode.bench.methods import medusa_method

    return Contender(spec, medusa_method(loaded.model, source.heads, settings, loaded.tokenizer, drafter=source))


def at_temperature(
    args: argparse.Namespace,
    loaded: Loaded,
    source: DrafterFactory,
    settings: Settings,
    prompts: list[list[int]],
    temperature: float,
) -> dict[str, Any]:
    """tau and speedup of the lossless rule at another temperature."""
    settings = replace(settings, temperature=temperature, acceptance=None, top_k=0, top_p=1.0, min_p=0.0)
    figures = measure(args, loaded, source, settings, prompts, [None] * len(prompts), 1)["methods"]["medusa"]
    kept = ("tau", "tau_interval", "speedup_vs_generate", "speedup_vs_generate_interval")
    return {"temperature": temperature} | {name: figures[name] for name in kept}


def lossy(
    args: argparse.Namespace,
    loaded: Loaded,
    source: DrafterFactory,
    settings: Settings,
    prompts: list[list[int]],
) -> list[dict[str, Any]]:
    """The rules that change the text, beside the one that does not, at one temperature (1 where the run was greedy).

    Quality: mean log-likelihood of a written token under the backbone at that temperature. A true sample has the
    backbone's own; text above it is more predictable than the model speaks, text below it less.
    """
    from decode.bench.benchmark import Contender, summarize
    from decode.bench.methods import medusa_method, plain_method, transformers_method
    from decode.request import LOSSY
    from medusa.backbone import Backbone

    model, tokenizer = loaded.model, loaded.tokenizer
    warm = replace(settings, temperature=settings.temperature or 1.0, acceptance="rejection")
    contenders = [
        Contender("plain", plain_method(model, warm, tokenizer)),
        Contender("transformers", transformers_method(model, warm, tokenizer)),
        *(
            Contender(
                rule, medusa_method(model, source.heads, replace(warm, acceptance=rule), tokenizer, drafter=source)
            )
            for rule in ("rejection", *LOSSY)
        ),
    ]
    take_turns(args, contenders, prompts, 1, "lossy rules")
    figures = summarize(contenders, [None] * len(prompts))
    return [
        {
            "acceptance": contender.name,
            "lossless": contender.name not in LOSSY,
            "temperature": warm.temperature,
            "tau": figures[contender.name]["tau"],
            "speedup_vs_generate": figures[contender.name]["speedup_vs_generate"],
            "log_likelihood": log_likelihood(Backbone(model), contender.rounds[0], warm.temperature),
        }
        for contender in contenders
        if contender.name != "transformers"
    ]


def log_likelihood(backbone: Any, results: list[Any], temperature: float) -> float:
    """Mean over all written tokens of log p(token | text before) in nats, p at `temperature` without truncation."""
    import torch

    total, count = 0.0, 0
    with torch.inference_mode():
        for result in results:
            ids = torch.tensor([result.input_ids + result.new_ids], device=backbone.device)
            hidden = backbone.hidden_states(ids[:, :-1], use_cache=False)[0, len(result.input_ids) - 1 :]
            for part, wanted in zip(hidden.split(64), ids[0, len(result.input_ids) :].split(64), strict=True):
                log_p = (backbone.lm_head(part).float() / temperature).log_softmax(-1)
                total += float(log_p.gather(1, wanted[:, None]).sum())
            count += len(result.new_ids)
    return total / max(count, 1)


def looked_into(
    args: argparse.Namespace,
    loaded: Loaded,
    source: DrafterFactory,
    settings: Settings,
    prompts: list[list[int]],
) -> dict[str, Any]:
    """What only a report shows: the nodes that steps accepted, and the calibration that holds here, if there is one."""
    from decode.bench import calibrate
    from decode.bench.benchmark import accepted_by_node
    from decode.bench.methods import medusa_method
    from decode.results import prompt_seeds
    from medusa.backbone import Backbone

    heads = source.heads
    assert heads is not None, "who else has calibrations"
    decode = medusa_method(loaded.model, heads, settings, loaded.tokenizer, drafter=source)
    seeds = prompt_seeds(args.seed, range(len(prompts)))
    results = [result for prompt, seed in zip(prompts, seeds, strict=True) for result in decode([prompt], seeds=[seed])]
    recording = calibrate.record(Backbone(loaded.model), heads, [(r.input_ids, r.new_ids) for r in results])
    found = calibrate.stored(
        calibrate.files_for(common.heads_folder(args.heads)),
        calibrate.situation(loaded.model, heads, settings, args.batch_size),
    )
    return {
        "accepted_by_node": accepted_by_node(recording.ranks, results),
        "calibration": found.to_dict() if found else None,
    }


def write_report(place: Path, written: dict[str, Any]) -> None:
    """One page; in a folder, also its pictures and the figures."""
    from decode.bench.report.benchmark_page import page
    from medusa.files import replacing_folder, write_json

    made = page(written)
    if is_page(str(place)):
        made.save(place)
        return
    with replacing_folder(place) as folder:
        made.save(folder / "report.html")
        made.save_pictures(folder)
        write_json(folder / "benchmark.json", written)


def show(args: argparse.Namespace, outcome: dict[str, Any]) -> None:
    """The table for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from decode.request import is_lossy

    settings, machine = outcome["settings"], outcome["machine"]
    console = common.output_console(args)
    table = Table(
        title=f"{settings['prompts']} prompts, {settings['max_new_tokens']} new tokens, temperature "
        f"{settings['temperature']:g}, {settings['drafter']}, {settings['nodes']} nodes, acceptance "
        f"{settings['acceptance']}",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in ("method", "tokens/s", "min-max", "tau", "x plain", "x generate", "same text"):
        figure = name != "method"
        table.add_column(name, justify="right" if figure else "left", no_wrap=True, min_width=figure * len(name))
    for name, figures in outcome["methods"].items():
        rate = figures["tokens_per_second"]
        table.add_row(
            name,
            f"{rate['median']:.0f}",
            f"{rate['min']:.0f}-{rate['max']:.0f}",
            f"{figures['tau']:.2f}" if figures["steps"] else "",
            f"{figures['speedup']:.2f}",
            f"{figures['speedup_vs_generate']:.2f}",
            f"{figures['equal_to_plain']:.0%}" if settings["temperature"] == 0 else "(sampled)",
        )
    console.print(table)
    medusa = outcome["methods"]["medusa"]
    if medusa["speedup_vs_generate_interval"]:
        low, high = medusa["speedup_vs_generate_interval"]
        console.print(f"95 % interval of the speedup over generate: {low:.2f} to {high:.2f}")
    for category, figures in medusa["by_category"].items():
        console.print(f"  {category}: tau {figures['tau']:.2f}, {figures['speedup']:.2f} x plain")
    for row in outcome.get("temperatures", []):
        console.print(
            f"  temperature {row['temperature']:g}: tau {row['tau']:.2f}, {row['speedup_vs_generate']:.2f} x generate"
        )
    for row in outcome.get("lossy", []):
        kind = "" if row["lossless"] else " (lossy)"
        console.print(
            f"  {row['acceptance']}{kind}, temperature {row['temperature']:g}: tau {row['tau']:.2f}, "
            f"{row['speedup_vs_generate']:.2f} x generate, {row['log_likelihood']:.2f} nats a token"
        )
    stages = medusa["step_ms"]
    total = sum(stages.values()) or 1.0
    shares = ", ".join(f"{stage} {value / total:.0%}" for stage, value in stages.items())
    console.print(f"a step takes {total:.2f} ms: {shares}")
    console.print(
        f"{machine['gpu'] or machine['processor']}, {machine['threads']} thread(s), {machine['dtype']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )
    if is_lossy(settings["acceptance"]):
        console.print(f"acceptance '{settings['acceptance']}' is lossy: this is not the backbone's own text")


def show_comparison(args: argparse.Namespace, comparison: Comparison) -> None:
    """What changed, for people."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from decode.bench.compare import interval_in_words

    console = common.output_console(args)
    console.print(f"{comparison.later} against {comparison.earlier}", highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "then", "now", "now / then", "95 %", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for change in comparison.changes:
        table.add_row(
            change.label,
            f"{change.earlier:.2f}",
            f"{change.later:.2f}",
            f"{change.ratio:.3f}",
            interval_in_words(change.ratio_interval),
            change.verdict,
        )
    console.print(table)
    for what, then, now in comparison.differences:
        console.print(f"  {what}: {then} -> {now}", highlight=False)
    if not comparison.same_machine:
        console.print("machine, threads or dtype differ: ratios may be compared, tokens per second may not")
