"""Measure the speedup: plain decoding, `model.generate` and the heads take turns on the same prompts.

  medusa benchmark demo --prompts demo
  medusa benchmark org/heads --prompts questions.jsonl --report report.html
  medusa benchmark org/heads --prompts questions.jsonl --compare old.json
  medusa benchmark --compare a.json b.json --report compared.html

Plain decoding is our own loop that generates one token per step. tau is the mean number of tokens per step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from decode.settings import Settings
from medusa.commands.effects import require_distinct, require_of_kind
from medusa.commands.inputs import require_against, require_drafter
from medusa.commands.options import PAGE_SUFFIXES, CommandOptions, Models, Prompts, warn_of_copies
from medusa.commands.speed import warn_if_useless
from medusa.errors import RequestError
from medusa.files import (
    Json,
    read_json,
    replacing_folder,
    require_absent,
    require_writable,
    require_writable_folder,
    write_json,
)
from medusa.options import count, group, option
from medusa.places import require_file

if TYPE_CHECKING:
    from decode.bench.compare import Comparison
    from decode.bench.measure import BenchmarkJob
    from decode.bench.result import BenchmarkResult
    from decode.drafters.base import DrafterFactory
    from medusa.records.record import Record

Earlier = list[tuple[str, "BenchmarkResult"]]  # results of earlier benchmarks, each with the name of its file


def temperatures(text: str) -> list[float]:
    """Parse a list of temperatures such as `0,0.5,1`, for argparse."""
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 <= value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of temperatures such as 0,0.5,1")
    return values


class BenchmarkOptions(CommandOptions):
    shown = "heads prompts max-prompts max-new-tokens temperature drafter tree rounds compare report backbone json"
    models: Models = group(Models, "models", without=("drafter",), backbone="")
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(Settings, "generation", max_new_tokens=128)
    drafter: tuple[str, ...] = option(
        (),
        "measure this drafter: heads (default), blockwise, mtp, model:NAME, ngram, rest:DIR, lookahead, mix:A+B "
        "(docs/drafters.md); repeatable: results call the first one `medusa`",
        metavar="NAME",
        brief="measure heads (default), ngram, ...; repeatable",
        exists=require_drafter,
    )
    rounds: int = count(3, "decode all prompts N times by each method", brief="decode all prompts N times")
    against: tuple[str, ...] = option(
        (),
        "also measure model.generate with assistance: model:B for the draft model B (a folder, a Hub id, or demo), or "
        "prompt-lookup; repeatable",
        metavar="METHOD",
        brief="also measure model:B or prompt-lookup; repeatable",
        exists=require_against,
    )
    prompt_lookup: bool = option(False, argparse.SUPPRESS)  # the names of earlier versions, to point to the new one
    draft_model: str | None = option(None, argparse.SUPPRESS, nargs="?", const="B")
    temperatures: tuple[float, ...] = option(
        (), "also measure tau and the speedup at these temperatures", metavar="T,T,...", type=temperatures, nargs=None
    )
    lossy: bool = option(False, "also measure the lossy acceptance rules, and the probability of their texts")
    report: str | None = option(
        None,
        "write an HTML page (a name that ends in .html), or a folder with page, pictures and JSON (a name without an "
        "ending)",
        metavar="PATH",
        brief="write an HTML page (.html), or a folder with pictures",
    )
    compare: tuple[str, ...] = option(
        (),
        "compare with earlier runs on the same prompts; without --backbone, the first file with the others",
        metavar="OLD",
        nargs="+",
        brief="compare with results of earlier runs (--json)",
        exists=require_file,
    )
    overwrite: bool = option(False, "replace an existing report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_lookup:
            raise RequestError("--prompt-lookup has another name now: --against prompt-lookup")
        if self.draft_model:
            raise RequestError(f"--draft-model has another name now: --against model:{self.draft_model}")
        for spec in self.against:
            if spec != "prompt-lookup" and not spec.removeprefix("model:") != spec != "model:":
                raise RequestError(f"--against is {spec!r}; give model:B, with a draft model B, or prompt-lookup")
        if self.report is not None:
            self._require_report(Path(self.report))

    def _require_report(self, place: Path) -> None:
        """Raise a `RequestError` if no report can be written at `place`, or if that would replace something else."""
        require_distinct(json=self.output.json, report=self.report)
        if self.reports_page:
            require_writable(self.report, "--report")
        elif place.suffix and not place.exists():
            raise RequestError(
                f"--report {place}: a report is an HTML page; name it {place.with_suffix('.html')}, or give a folder, "
                "which has no ending"
            )
        require_absent(place, self.overwrite)
        if not self.reports_page:
            require_of_kind("report", place, "a report", "report.html", "benchmark.json")
            require_writable_folder(place, option="--report")

    def completed(self) -> Self:
        """Return the options with the backbone that the heads record, unless only files are compared."""
        return self if self.compare and self.models.heads is None else super().completed()

    @property
    def may_sample(self) -> bool:
        """Whether options such as --top-p have an effect; --temperatures may contain temperatures above 0."""
        return super().may_sample or any(self.temperatures)

    @property
    def reports_page(self) -> bool:
        """Whether --report names one HTML page (.html or .htm). Any other path is a folder."""
        return self.report is not None and Path(self.report).suffix in PAGE_SUFFIXES

    @property
    def draft_models(self) -> tuple[str, ...]:
        return tuple(spec.removeprefix("model:") for spec in self.against if spec != "prompt-lookup")

    @property
    def uses_typical(self) -> bool:
        return self.lossy or super().uses_typical

    @property
    def drafters(self) -> tuple[str | None, ...]:
        """The drafters to measure, as the user wrote them in --drafter; `None` means the Medusa heads."""
        return self.drafter or (None,)

    def require_measurable(self) -> None:
        """Raise a `RequestError` if an option that a measurement needs is missing, or two cannot be combined."""
        for name in ("backbone", "heads") if self.drafters == (None,) else ("backbone",):
            if not getattr(self.models, name):
                raise RequestError(f"--{name} is missing; give it, or two files to --compare")
        if len(set(self.drafters)) < len(self.drafters):
            raise RequestError(f"--drafter {' --drafter '.join(self.drafter)}: one is given twice; leave one out")
        if len(set(self.against)) < len(self.against):
            raise RequestError(f"--against {' --against '.join(self.against)}: one is given twice; leave one out")
        if self.against and self.contrasting.amateur:
            raise RequestError("--against cannot be combined with --amateur; leave one out")
        if self.against and self.batch_size > 1:
            raise RequestError(
                f"--against {self.against[0]}: model.generate assists one prompt at a time, and --batch-size is "
                f"{self.batch_size}; leave out --against, or use --batch-size 1"
            )


def run(options: BenchmarkOptions) -> None:
    benchmark(options)


def benchmark(options: BenchmarkOptions) -> Json:
    """Measure or compare what the options ask for, print and write the results, and return them."""
    from decode.bench.compare import compare
    from decode.bench.report.terminal import print_comparison, print_headline
    from decode.bench.result import BenchmarkResult

    result: BenchmarkResult | None = None
    earlier = [(name, BenchmarkResult.from_json(read_json(Path(name)), name)) for name in options.compare]
    for name, old in earlier:
        old.require_prompts(name)
    if not options.models.backbone and earlier:
        (first, base), *others = earlier
        if not others:
            raise RequestError(
                f"a comparison needs two files, and {first} is one; give another, or --backbone B --heads H --prompts P"
            )
        comparisons = [compare(base, other, (first, name)) for name, other in others]
    else:
        result, comparisons = measure(options, earlier)
    for comparison in comparisons:
        print_comparison(options.output.console, comparison)
    if result is not None:
        print_headline(options.output.console, result)
    content = {} if result is None else result.to_json()
    if comparisons or result is None:
        content["comparisons"] = [comparison.to_json() for comparison in comparisons]
    try:
        if options.report:
            from decode.bench.report.page import benchmark_page

            page, place = benchmark_page(result, comparisons), Path(options.report)
            if options.reports_page:
                page.save(place)
            else:
                with replacing_folder(place) as folder:
                    page.save(folder / "report.html")
                    page.save_pictures(folder)
                    write_json(folder / "benchmark.json", content)
    finally:  # afterwards, because the report may replace the folder of this file; also if the report fails
        options.output.write(content)
    return content


def require_same_prompts(options: BenchmarkOptions, records: Sequence[Record], earlier: Earlier) -> None:
    """Raise a `RequestError` if an earlier benchmark decoded other prompts. This loads the tokenizer but no weights."""
    from decode.bench.measure import prompts_hash
    from medusa.commands.models import form_of, limits_of
    from medusa.commands.prompting import fitting

    ids = form_of(options).ids(records, options.files.tokenizer)
    _, prompts = fitting(records, ids, limits_of(options), options.prompts.skip_long, lambda line: None)
    fingerprint = prompts_hash(prompts)
    for name, result in earlier:
        if result.settings.prompts_sha256 != fingerprint:
            raise RequestError(
                f"{name} was measured on other prompts; give the same --prompts, --prompt, --max-prompts and --raw"
            )


def measure(
    options: BenchmarkOptions, earlier: Earlier, calibrates: bool = True
) -> tuple[BenchmarkResult, list[Comparison]]:
    """Measure the decoding speed, print the metrics, and return them with comparisons to `earlier` benchmarks.

    `calibrates`: whether to calibrate a tree for heads that have no tree."""
    from decode.bench.compare import compare
    from decode.bench.measure import BenchmarkJob, require_settings
    from decode.bench.report.terminal import print_benchmark
    from medusa.commands import models

    options.require_measurable()
    require_settings(options.settings, options.temperatures, options.lossy)
    output, records = options.output, options.prompts.read()
    if earlier:
        require_same_prompts(options, records, earlier)  # before the weights are loaded and a tree is calibrated
    opened = models.open_models(options, records, options.drafters, calibrates, options.prompts.skip_long)
    warn_of_copies(opened.prompts, opened.settings)
    source, *others = opened.drafters
    with output.progress_bars() as start_progress:
        job = BenchmarkJob(
            **opened.job(),
            categories=[record.category for record in opened.records],
            rounds=options.rounds,
            command=output.command_line,
            start_progress=start_progress,
        )
        result = measure_all(options, job, dict(zip(options.drafter[1:], others, strict=True)))
    print_benchmark(output.console, result)
    if source.heads is not None:
        warn_if_useless(result.medusa.new_tokens, result.medusa.tau, source.num_nodes, result.settings.prompts)
    return result, [compare(content, result, (name, "this run")) for name, content in earlier]


def measure_all(options: BenchmarkOptions, job: BenchmarkJob, others: dict[str, DrafterFactory]) -> BenchmarkResult:
    """Measure all that the options ask for. `job` holds the first drafter, `others` further drafters by name."""
    from decode.bench import measure
    from decode.bench.benchmark import Contender
    from decode.bench.calibration.stored import files_for
    from medusa.commands.trees import heads_folder

    assistants = [*([None] if "prompt-lookup" in options.against else []), *options.draft_models]
    further = [measure.assisted(job, name, options.load.trust_remote_code) for name in assistants]
    further += [Contender(name, job.drafted(job.settings, source=source)) for name, source in others.items()]
    result = measure.run_benchmark(job, further)
    if options.temperatures:
        result.temperatures = [measure.at_temperature(job, at) for at in options.temperatures]
    if options.lossy:
        result.lossy = measure.compare_lossy_rules(job)
    calibrations = files_for(heads_folder(options.models.heads))
    measure.add_prediction(job, result.medusa, calibrations)
    if options.report and job.source.heads is not None:
        measure.add_details(job, result.medusa, calibrations)
    return result
