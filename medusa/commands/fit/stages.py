"""The stages of `medusa fit` after the plan: each runs one of the other commands, and returns figures to keep."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import NamedTuple, TypeVar

import yaml

from decode.bench.calibration.stored import TooFewStepsError
from decode.settings import Settings
from medusa.arguments import as_arguments
from medusa.commands.benchmark import BenchmarkOptions, benchmark
from medusa.commands.calibrate import CalibrateOptions, find_tree
from medusa.commands.distill import DistillOptions, distill
from medusa.commands.export import ExportOptions, export
from medusa.commands.fit.conclusion import fastest, install
from medusa.commands.fit.options import REPORT, RESULTS, FitOptions, HeadsChoice
from medusa.commands.fit.plan import Plan, text_settings
from medusa.commands.fit.probe import Probe
from medusa.commands.fit.prompts import Split, write_prompts
from medusa.commands.fit.state import FitState
from medusa.commands.options import Models, ModelsWithHeads, Prompts, warn
from medusa.commands.trees import HEADS
from medusa.errors import NotCompilableError, RequestError, RunError
from medusa.files import Json, write_text
from medusa.memory import release
from medusa.options import Options
from medusa.records.sources import FAILED

CALIBRATION_TOKENS = 128  # per text
CALIBRATED_ON = 6000  # tokens; at up to six tokens a step, twice the steps that a calibration needs
FEWEST_TEXTS = 32
LOST = 0.1  # of the answers of a server; if more fail, the run stops, and goes on if as many fail again
TEST, TRAIN, TEXT = "test.jsonl", "prompts.jsonl", "text.jsonl"
Result = TypeVar("Result")


class Stage(NamedTuple):
    """A stage of a run. Its `work` is done once, and returns the figures that the run's state keeps."""

    name: str
    title: str
    command: str  # that does the work of this stage alone
    work: Callable[[], Json]


class Run(NamedTuple):
    """A run of `medusa fit`: its options, and its work folder, plan and model's probe."""

    options: FitOptions
    work: Path
    plan: Plan
    probe: Probe

    @property
    def for_transformers(self) -> bool:
        """Whether the heads are for this toolkit, and not for a server."""
        return self.options.purpose == "transformers"

    def prompts(self, name: str, most: int | None = None) -> Prompts:
        """The prompts in a file of the work folder, all of them or the first `most`."""
        return replace(self.options.prompts, prompts=str(self.work / name), max_prompts=most)

    def settings(self, tokens: int, compiled: bool = False) -> Settings:
        """The decoding options of a stage that writes at most `tokens` tokens to a prompt."""
        names = ("ignore_eos", "ignore_generation_config")
        asked = {name: getattr(self.options, name) for name in names}
        return Settings(max_new_tokens=tokens, compile=compiled, **asked)

    def compiled_or_eager(self, compiled: bool, work: Callable[[bool], Result]) -> tuple[Result, bool]:
        """Do `work` with compiled steps, or with eager ones where only the default compiles and fails; tell which."""
        try:
            return work(compiled), compiled
        except NotCompilableError as error:
            if self.options.compile or not compiled:
                raise
            warn(f"steps are not compiled, so the speedup is that of eager steps: {error.reason}")
        return work(False), False


def make(run: Run, state: FitState, sides: Split, choices: list[HeadsChoice]) -> None:
    """Run the stages that are not finished."""
    if "text" not in state.stages:
        write_sides(run, sides)
    finish(text_stage(run), run, state)
    for choice in choices:
        finish(training_stage(run, choice), run, state)
    for choice in choices:
        finish(calibration_stage(run, choice, state, len(sides.train)), run, state)
    best = fastest(choices, state)
    install(run.work / best.name, run.options.folder)
    state.content["kind"] = best.name
    finish(benchmark_stage(run, state, state.is_compiled(f"calibrate {best.name}")), run, state)
    if not run.for_transformers:
        finish(export_stage(run), run, state)
    state.finish_run()


def finish(stage: Stage, run: Run, state: FitState) -> None:
    """Run a stage, and keep its figures; a stage that is finished already is only named.

    Errors name the stage's command, because their advice is about its options."""
    console = run.options.output.console
    console.print(f"\n[bold cyan]{stage.title}[/bold cyan]", highlight=False)
    if stage.name in state.stages:
        console.print("    finished before")
        return
    console.print(f"    this stage alone: [dim]{stage.command}[/dim]", soft_wrap=True, highlight=False)
    release()  # each stage loads the model, and the memory may hold it only once
    try:
        figures = stage.work()
    except (RequestError, RunError) as error:
        runs = " ".join(shlex.split(stage.command)[:2])
        told = f"stage {stage.name}, which runs {runs}: {getattr(error, 'typed', error)}"
        if "--overwrite" in told:
            told += "; in medusa fit, --overwrite starts the whole run again"
        raise (RequestError if isinstance(error, RequestError) else RunError)(told) from error
    state.finish(stage.name, figures)


def write_sides(run: Run, sides: Split) -> None:
    """Write the prompts to train on, repeated to the number of texts in the plan, and the prompts set aside."""
    run.work.mkdir(parents=True, exist_ok=True)
    write_prompts(run.work / TRAIN, islice(cycle(sides.train), run.plan.texts))
    write_prompts(run.work / TEST, sides.test)


def text_stage(run: Run) -> Stage:
    """The stage in which the model answers the prompts."""
    options = DistillOptions(
        models=Models(backbone=run.options.model),
        load=run.options.load,
        prompts=run.prompts(TRAIN),
        settings=text_settings(run.options, run.probe.context),
        raw=run.options.raw,
        template_option=run.options.template_option,
        server=run.options.server,
        model=run.options.server_model,
        runtime=run.options.runtime,
        output=run.options.output_to(None),
        out=str(run.work / TEXT),
    )

    def work() -> Json:
        failed = (run.work / TEXT).with_suffix(FAILED)
        before = len(failed.read_text(encoding="utf-8").splitlines()) if failed.exists() else 0
        figures = distill(options)
        run.options.output.note(str(figures))
        if figures.warning:
            warn(figures.warning)
        if figures.failed:
            asked = figures.texts + figures.failed
            if run.options.server is not None and figures.failed > LOST * asked and figures.failed != before:
                told = (
                    f"{figures.failed} of {asked} answers of the server failed; {figures.failed_path} has the reasons"
                )
                raise RunError(f"{told}, and the same command asks again")
            # Of the others, most are later questions of long conversations; to try again would not help.
            warn(f"training does without {figures.failed} of {asked} answers; {figures.failed_path} has the reasons")
        return {"texts": figures.texts, "tokens": figures.tokens, "mean_tokens": figures.tokens / figures.texts}

    return Stage("text", f"1/4 The model answers {run.plan.texts:,} prompts", command_line("distill", options), work)


def training_stage(run: Run, choice: HeadsChoice) -> Stage:
    """The stage in which one kind of heads is trained on the text."""
    path, content = run.work / f"{choice.name}.yaml", recipe(run, choice)

    def work() -> Json:
        from train.checkpoints import whole_checkpoints
        from train.recipe import parse_recipe
        from train.run import finished, train

        write_text(path, yaml.safe_dump(content, sort_keys=False))
        threads = run.options.runtime.threads or run.probe.training_threads or None
        replace(run.options.runtime, threads=threads).prepare()
        config = parse_recipe(content, str(path))
        if (done := finished(config)) is not None:  # an interruption came before the state was written
            return done.to_dict()
        resume = bool(whole_checkpoints(Path(config.output_dir)))
        return train(config, resume=resume, overwrite=not resume, quiet=run.options.output.quiet).to_dict()

    minutes = f"{run.plan.training_minutes:.3g} minutes"
    title = f"2/4 Heads of kind {choice.name} are trained for {minutes}; the model does not change"
    return Stage(f"train {choice.name}", title, shlex.join(["medusa", "train", str(path)]), work)


def recipe(run: Run, choice: HeadsChoice) -> Json:
    """Return the training recipe for one kind of heads."""
    options, plan = run.options, run.plan
    load = {known.name: getattr(options.load, known.name) for known in fields(options.load)}  # keys of the same names
    return {
        "backbone": options.model,
        "data": {"path": str(run.work / TEXT), "sequence_length": plan.sequence_length, "long_documents": "truncate"},
        "output_dir": str(run.work / choice.name),
        "heads": choice.heads,
        "training": {
            "max_minutes": round(plan.training_minutes, 3),
            "per_device_train_batch_size": plan.rows,
            "seed": options.runtime.seed,
            "log_lines": False,
        },
        **{name: value for name, value in load.items() if value},
    }


def calibration_stage(run: Run, choice: HeadsChoice, state: FitState, different: int) -> Stage:
    """The stage that finds the fastest tree for one kind of heads, after the text stage.

    It reads at most `different` prompts: those after them are copies (`write_sides`)."""
    mean = state.stages["text"]["mean_tokens"] or run.plan.text_tokens / run.plan.texts  # 0: a server did not tell
    length = min(max(mean, 1), CALIBRATION_TOKENS)
    planned = run.plan.compiled

    def options(compiled: bool) -> CalibrateOptions:
        return CalibrateOptions(
            models=ModelsWithHeads(backbone=run.options.model, heads=str(run.work / choice.name)),
            load=run.options.load,
            prompts=run.prompts(TRAIN, min(max(ceil(CALIBRATED_ON / length), FEWEST_TEXTS), different)),
            settings=run.settings(CALIBRATION_TOKENS, compiled=compiled),
            runtime=run.options.runtime,
            output=run.options.output_to(run.work / f"{choice.name}-calibration.json"),
        )

    def work() -> Json:
        try:
            found, compiled = run.compiled_or_eager(planned, lambda compiled: find_tree(options(compiled)))
        except TooFewStepsError as error:  # too little text: decoding takes the default tree
            run.options.output.note(f"no calibration: {error}")
            return {"refused": str(error), "compiled": planned}
        best = found.best if run.for_transformers else found.of_heads  # a server gets nothing but the heads
        names = ("nodes", "dynamic", "drafter", "tau", "step_ms")
        return {name: getattr(best, name) for name in names} | {"compiled": compiled}

    title = f"3/4 The fastest tree for heads of kind {choice.name}"
    return Stage(f"calibrate {choice.name}", title, command_line("calibrate", options(planned)), work)


def benchmark_stage(run: Run, state: FitState, planned: bool) -> Stage:
    """The stage that measures the speedup on the prompts set aside, and writes the report.

    `planned`: with compiled steps, if compiling does not fail."""
    folder = run.options.folder

    def options(compiled: bool) -> BenchmarkOptions:
        return BenchmarkOptions(
            models=Models(backbone=run.options.model, heads=str(folder), tree="auto"),
            drafter=() if run.for_transformers else (HEADS,),
            load=run.options.load,
            prompts=run.prompts(TEST, run.plan.test_prompts),
            settings=run.settings(run.plan.benchmark_tokens, compiled=compiled),
            rounds=run.plan.rounds,
            report=str(folder / REPORT),
            overwrite=True,
            runtime=run.options.runtime,
            output=run.options.output_to(folder / RESULTS),
        )

    def measure(compiled: bool) -> Json:
        asked = options(compiled)
        shown = command_line("benchmark", asked)  # in the report
        return benchmark(replace(asked, output=replace(asked.output, command_line=shown)))

    def work() -> Json:
        state.results, compiled = run.compiled_or_eager(planned, measure)
        return state.results["methods"]["medusa"] | {"compiled": compiled}

    title = f"4/4 The speedup on {run.plan.test_prompts} prompts set aside"
    return Stage("benchmark", title, command_line("benchmark", options(planned)), work)


def export_stage(run: Run) -> Stage:
    """The stage that writes the heads in the format of the server that `--for` names."""
    asked = run.options
    options = ExportOptions(
        heads=str(asked.folder),
        to=asked.purpose,
        out=str(asked.folder / asked.purpose),
        overwrite=True,
        backbone=asked.model,
        load=asked.load,
        output=asked.output_to(run.work / "export.json"),
    )
    title = f"The heads in the format of {asked.purpose}"
    return Stage("export", title, command_line("export", options), lambda: export(options))


def command_line(command: str, options: Options) -> str:
    """Return the command with these options, as a user types it."""
    return shlex.join(["medusa", command, *as_arguments(options)])
