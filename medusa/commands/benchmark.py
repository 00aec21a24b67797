"""Measure the speedup: plain decoding, `model.generate` and the heads take turns on the same prompts.

medusa benchmark --backbone demo --heads demo --prompts prompts.jsonl --report report.html
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --tree topk:3,2 --json b.json
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --drafter heads --drafter ngram
medusa benchmark --backbone org/model --heads org/heads --prompts questions.jsonl --compare b.json
medusa benchmark --compare a.json b.json --report compared.html
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.commands import common
from medusa.errors import RequestError
from medusa.files import read_json, replacing_folder, require_absent, write_json

if TYPE_CHECKING:
    from decode.bench.compare import Comparison
    from decode.bench.figures import BenchmarkResult
    from decode.bench.measure import BenchmarkJob
    from decode.drafters.base import DrafterConfig, DrafterFactory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    common.add_backbone(parser, required=False, backbone_required=False)
    common.add_prompts(parser)
    common.add_generation(parser, max_new_tokens=128)
    common.add_drafter(parser, several=True)
    common.add_amateur(parser)
    group = parser.add_argument_group("what is measured")
    group.add_argument(
        "--rounds", type=common.positive, default=3, metavar="N", help="rounds over all prompts (default: %(default)s)"
    )
    group.add_argument("--prompt-lookup", action="store_true", help="also measure model.generate with prompt lookup")
    group.add_argument(
        "--draft-model", metavar="B", help="also measure model.generate with this draft model; demo is shipped"
    )
    group.add_argument(
        "--temperatures", type=temperatures, default=[], metavar="T,T,...", help="also measure tau and speedup at these"
    )
    group.add_argument(
        "--lossy", action="store_true", help="also measure the lossy rules, with the likelihood of their texts"
    )
    group = parser.add_argument_group("report")
    group.add_argument("--report", metavar="FILE.html|DIR", help="write a page; into a folder also PNGs and JSON")
    group.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="OLD.json",
        help="compare with earlier runs on the same prompts; without --backbone, the first file with the others",
    )
    group.add_argument("--overwrite", action="store_true", help="replace an existing report")
    common.add_machine(parser)


def temperatures(text: str) -> list[float]:
    """A list such as `0,0.5,1`, for argparse."""
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
        require_absent(Path(args.report), args.overwrite)
    result: BenchmarkResult | None = None
    earlier = [(name, read_benchmark(name)) for name in args.compare]
    if args.backbone is None and earlier:
        comparisons = compare_files(earlier)
    else:
        result, comparisons = measure(args, earlier)
    from decode.bench.report.terminal import print_comparison

    for comparison in comparisons:
        print_comparison(common.output_console(args), comparison)
    content = {} if result is None else result.to_json()
    if comparisons or result is None:
        content["comparisons"] = [comparison.to_json() for comparison in comparisons]
    common.write_results(args, content)
    if args.report:
        write_report(Path(args.report), result, comparisons, content)


def is_page(path: str | None) -> bool:
    """Whether a report is one page; otherwise it is a folder."""
    return path is not None and Path(path).suffix in (".html", ".htm")


def read_benchmark(name: str) -> BenchmarkResult:
    """An earlier run that others can be compared with.

    Raises:
        RequestError: the file is no benchmark, or an early version wrote it."""
    from decode.bench.figures import BenchmarkResult

    result = BenchmarkResult.from_json(read_json(Path(name)), name)
    result.require_prompts(name)
    return result


def compare_files(earlier: list[tuple[str, BenchmarkResult]]) -> list[Comparison]:
    """Compare the first file with each of the others.

    Raises:
        RequestError: there is only one file."""
    from decode.bench.compare import compare

    (first, base), *others = earlier
    if not others:
        raise RequestError(
            f"--compare {first} alone has nothing to be compared with; give a second file, or "
            "--backbone B --heads H --prompts P to measure now"
        )
    return [compare(base, result, (first, name)) for name, result in others]


def check_request(args: argparse.Namespace) -> list[DrafterConfig]:
    """The drafters that take part, checked with the other options before any model is loaded.

    Raises:
        RequestError: options that are missing or cannot be combined."""
    specs: list[str | None] = args.drafter or [None]
    for option in ("backbone", "heads") if specs == [None] else ("backbone",):
        if getattr(args, option) is None:
            raise RequestError(f"--{option} is missing; give it, or two files to --compare")
    if len(set(specs)) < len(specs):
        raise RequestError(f"--drafter {' --drafter '.join(map(str, specs))}: one is given twice")
    configs = [common.plan_of(args, spec, alone=len(specs) == 1) for spec in specs]
    common.contrast_of(args)
    assisted = args.prompt_lookup or args.draft_model
    if args.amateur and assisted:
        raise RequestError(
            "transformers' assisted generation cannot be combined with --amateur; leave out --prompt-lookup and "
            "--draft-model"
        )
    if args.batch_size > 1 and assisted:
        raise RequestError(
            f"transformers' assisted generation takes one prompt at a time, and --batch-size is {args.batch_size}; "
            "leave out --prompt-lookup and --draft-model, or take --batch-size 1"
        )
    return configs


def measure(
    args: argparse.Namespace, earlier: list[tuple[str, BenchmarkResult]]
) -> tuple[BenchmarkResult, list[Comparison]]:
    """Measure, show the figures, and compare them with earlier runs."""
    configs = check_request(args)
    settings, records = common.settings_of(args), common.read_prompts(args)
    common.check_models(args, *configs)

    from decode.bench.compare import compare
    from decode.bench.measure import BenchmarkJob, prompts_hash
    from decode.bench.report.terminal import print_benchmark
    from medusa.records.record import prompt_ids

    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    common.hint_at_bfloat16(args, loaded)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    settings = common.with_amateur(args, loaded, settings)
    common.require_fitting(prompts, loaded, settings.amateur)
    for name, result in earlier:
        if result.settings.prompts_sha256 != prompts_hash(prompts):
            raise RequestError(f"{name} was measured on other prompts, so nothing can be paired; give it the same ones")
    source, *others = [common.open_source(args, loaded, config, settings) for config in configs]
    spec, *_ = args.drafter or [None]
    job = BenchmarkJob(
        loaded=loaded,
        source=source,
        settings=settings,
        prompts=prompts,
        categories=[record.category for record in records],
        heads=args.heads,
        drafter=spec or "heads",
        tree=common.drafter_json(spec, source)["tree"],
        rounds=args.rounds,
        batch_size=args.batch_size,
        seed=args.seed,
        command=shlex.join(["medusa", *args.words]),
    )
    with common.progress_bars(args) as start_progress:
        result = measure_all(args, replace(job, start_progress=start_progress), others)
    print_benchmark(common.output_console(args), result)
    if source.heads is not None:
        common.warn_if_useless(result.medusa.new_tokens, result.medusa.tau)
    return result, [compare(content, result, (name, "this run")) for name, content in earlier]


def measure_all(args: argparse.Namespace, job: BenchmarkJob, others: list[DrafterFactory]) -> BenchmarkResult:
    """Take all measurements that were asked for; `others` are the further drafters."""
    from decode.bench import measure
    from decode.bench.benchmark import Contender
    from decode.bench.calibration.stored import files_for

    further = [measure.prompt_lookup(job)] if args.prompt_lookup else []
    if args.draft_model:
        further.append(measure.assisted_by(job, args.draft_model, args.trust_remote_code))
    specs = args.drafter[1:] if others else []
    for spec, source in zip(specs, others, strict=True):
        further.append(Contender(spec, job.drafted(job.settings, source=source)))
    result = measure.run_benchmark(job, further)
    if args.temperatures:
        result.temperatures = [measure.at_temperature(job, at) for at in args.temperatures]
    if args.lossy:
        result.lossy = measure.compare_lossy_rules(job)
    if args.report and job.source.heads is not None:
        measure.add_details(job, result.medusa, files_for(common.heads_folder(args.heads)))
    return result


def write_report(
    place: Path, result: BenchmarkResult | None, comparisons: list[Comparison], content: dict[str, object]
) -> None:
    """Write one page; into a folder also its pictures and the figures, `content`."""
    from decode.bench.report.page import benchmark_page

    made = benchmark_page(result, comparisons)
    if is_page(str(place)):
        made.save(place)
        return
    with replacing_folder(place) as folder:
        made.save(folder / "report.html")
        made.save_pictures(folder)
        write_json(folder / "benchmark.json", content)
