"""The stages of `medusa fit` after the plan. Each runs one of the other commands, and returns figures to keep."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import NamedTuple, Protocol

import yaml

from decode.bench.calibration.stored import TooFewStepsError
from decode.settings import Settings
from medusa.arguments import as_arguments
from medusa.commands import benchmark, calibrate, distill, export
from medusa.commands.benchmark import BenchmarkOptions
from medusa.commands.calibrate import CalibrateOptions
from medusa.commands.distill import DistillOptions
from medusa.commands.export import ExportOptions
from medusa.commands.fit.choices import HeadsChoice
from medusa.commands.fit.options import FitOptions
from medusa.commands.fit.plan import Plan
from medusa.commands.fit.probe import Probe
from medusa.commands.fit.prompts import Split, write_prompts
from medusa.commands.fit.state import FitState
from medusa.commands.options import Models, ModelsWithHeads, Prompts, warn
from medusa.errors import NotCompilableError
from medusa.files import Json, read_json, write_text
from medusa.options import Options

TEMPERATURE = 0.7  # of the text: enough variety that several answers to one prompt differ
CALIBRATION_TOKENS = 128  # per text
CALIBRATED_ON = 6000  # tokens; at up to six tokens a step, twice the steps that a calibration needs
FEWEST_TEXTS = 32
TEST, TRAIN, TEXT, RECIPE = "test.jsonl", "prompts.jsonl", "text.jsonl", "recipe.yaml"
REPORT, RESULTS = "report.html", "benchmark.json"


class Run(NamedTuple):
    """A run of `medusa fit`: its options, and its work folder, plan and model's probe."""

    options: FitOptions
    work: Path
    plan: Plan
    probe: Probe

    def prompts(self, name: str) -> Prompts:
        """The prompts in a file of the work folder."""
        return replace(self.options.prompts, prompts=str(self.work / name), max_prompts=None)

    def settings(self, tokens: int, temperature: float = 0.0, compiled: bool = False) -> Settings:
        """The decoding options of a stage that writes at most `tokens` tokens to a prompt."""
        names = ("ignore_eos", "ignore_generation_config")
        asked = {name: getattr(self.options, name) for name in names}
        return Settings(max_new_tokens=tokens, temperature=temperature, compile=compiled, **asked)

    def compiled_or_eager(self, compiled: bool, work: Callable[[bool], None]) -> bool:
        """Do `work` with compiled steps, or with eager ones where only the default compiles and fails; return which."""
        try:
            work(compiled)
        except NotCompilableError as error:
            if self.options.compile or not compiled:
                raise
            warn(f"steps are not compiled, so the speedup is that of eager steps: {error}")
            work(False)
            return False
        return compiled

    @property
    def tokens(self) -> int:
        """Tokens of an answer, at most."""
        return self.plan.text_tokens // max(self.plan.texts, 1)


def write_sides(run: Run, sides: Split) -> None:
    """Write the prompts to train on, repeated to the number of texts in the plan, and the prompts set aside."""
    run.work.mkdir(parents=True, exist_ok=True)
    write_prompts(run.work / TRAIN, islice(cycle(sides.train), run.plan.texts))
    write_prompts(run.work / TEST, sides.test)


class Stage(Protocol):
    """A stage of a run. Its `work` is done once, and returns the figures that the run's state keeps."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def command(self) -> str:
        """The command that does the work of this stage alone."""

    def work(self) -> Json: ...


@dataclass(frozen=True)
class TextStage:
    """The stage in which the model answers the prompts."""

    run: Run
    name = "text"

    @property
    def title(self) -> str:
        return f"1/4 The model answers {self.run.plan.texts:,} prompts"

    @property
    def options(self) -> DistillOptions:
        run = self.run
        return DistillOptions(
            models=Models(backbone=run.options.model),
            load=run.options.load,
            prompts=run.prompts(TRAIN),
            settings=run.settings(run.tokens, TEMPERATURE),
            raw=run.options.raw,
            template_option=run.options.template_option,
            batch_size=run.probe.batch_size,
            runtime=run.options.runtime,
            output=run.options.output_to(None),
            out=str(run.work / TEXT),
        )

    @property
    def command(self) -> str:
        return command_line("distill", self.options)

    def work(self) -> Json:
        figures = distill.distill(self.options)
        self.run.options.output.note(str(figures))
        if figures.warning:
            warn(figures.warning)
        if figures.failed:  # later questions of long conversations; to try again would not help
            asked = figures.texts + figures.failed
            warn(f"training does without {figures.failed} of {asked} answers; {figures.failed_path} has the reasons")
        rows = [json.loads(line) for line in (self.run.work / TEXT).read_text(encoding="utf-8").splitlines()]
        tokens = sum(len(row["input_ids"]) - row["prompt_tokens"] for row in rows)
        return {"texts": len(rows), "tokens": tokens, "mean_tokens": tokens / len(rows)}


@dataclass(frozen=True)
class TrainingStage:
    """The stage in which one kind of heads is trained on the text."""

    run: Run
    choice: HeadsChoice

    @property
    def name(self) -> str:
        return f"train {self.choice.name}"

    @property
    def title(self) -> str:
        minutes = f"{self.run.plan.training_minutes:.3g} minutes"
        return f"2/4 Heads of kind {self.choice.name} are trained for {minutes}; the model does not change"

    @property
    def recipe(self) -> Path:
        return self.run.work / f"{self.choice.name}.yaml"

    @property
    def command(self) -> str:
        return shlex.join(["medusa", "train", str(self.recipe)])

    def work(self) -> Json:
        from train.checkpoints import whole_checkpoints
        from train.recipe import parse_recipe
        from train.run import finished, train

        options, content = self.run.options, recipe(self.run, self.choice)
        write_text(self.recipe, yaml.safe_dump(content, sort_keys=False))
        options.runtime.prepare()
        config = parse_recipe(content, str(self.recipe))
        if (done := finished(config)) is not None:  # an interruption came before the state was written
            return done.to_dict()
        resume = bool(whole_checkpoints(Path(config.output_dir)))
        return train(config, resume=resume, overwrite=not resume, quiet=options.output.quiet).to_dict()


def recipe(run: Run, choice: HeadsChoice) -> Json:
    """Return the training recipe for one kind of heads."""
    options, plan = run.options, run.plan
    load = {known.name: getattr(options.load, known.name) for known in fields(options.load)}  # keys of the same names
    return {
        "backbone": options.model,
        "data": {"path": str(run.work / TEXT), "sequence_length": plan.sequence_length},
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


@dataclass(frozen=True)
class CalibrationStage:
    """The stage that finds the fastest tree for one kind of heads."""

    run: Run
    choice: HeadsChoice
    state: FitState

    @property
    def name(self) -> str:
        return f"calibrate {self.choice.name}"

    @property
    def title(self) -> str:
        return f"3/4 The fastest tree for heads of kind {self.choice.name}"

    def options(self, compiled: bool) -> CalibrateOptions:
        run = self.run
        length = min(max(self.state.stages["text"]["mean_tokens"], 1), CALIBRATION_TOKENS)
        return CalibrateOptions(
            models=ModelsWithHeads(backbone=run.options.model, heads=str(run.work / self.choice.name)),
            load=run.options.load,
            prompts=replace(run.prompts(TRAIN), max_prompts=max(ceil(CALIBRATED_ON / length), FEWEST_TEXTS)),
            settings=run.settings(CALIBRATION_TOKENS, compiled=compiled),
            runtime=run.options.runtime,
            output=run.options.output_to(run.work / f"{self.choice.name}-calibration.json"),
        )

    @property
    def command(self) -> str:
        return command_line("calibrate", self.options(self.run.plan.compiled))

    def work(self) -> Json:
        """Calibrate, and say whether the steps were compiled."""
        compiled = self.run.plan.compiled
        try:
            compiled = self.run.compiled_or_eager(compiled, lambda compiled: calibrate.run(self.options(compiled)))
        except TooFewStepsError as error:  # too little text: decoding takes the default tree
            self.run.options.output.note(f"no calibration: {error}")
            return {"refused": str(error), "compiled": compiled}
        found = read_json(Path(str(self.options(compiled).output.json)))
        best = found["points"][found["chosen"]]
        return {name: best[name] for name in ("nodes", "dynamic", "tau", "step_ms")} | {"compiled": compiled}


@dataclass(frozen=True)
class BenchmarkStage:
    """The stage that measures the speedup on the prompts set aside, and writes the report."""

    run: Run
    compiled: bool
    name = "benchmark"

    @property
    def title(self) -> str:
        return f"4/4 The speedup on {self.run.plan.test_prompts} prompts set aside"

    def options(self, compiled: bool) -> BenchmarkOptions:
        run, folder = self.run, self.run.options.folder
        return BenchmarkOptions(
            models=Models(backbone=run.options.model, heads=str(folder), tree="auto"),
            load=run.options.load,
            prompts=replace(run.prompts(TEST), max_prompts=run.plan.test_prompts),
            settings=run.settings(run.plan.benchmark_tokens, compiled=compiled),
            rounds=run.plan.rounds,
            report=str(folder / REPORT),
            overwrite=True,
            runtime=run.options.runtime,
            output=run.options.output_to(folder / RESULTS),
        )

    @property
    def command(self) -> str:
        return command_line("benchmark", self.options(self.compiled))

    def work(self) -> Json:
        """Measure, and say whether the steps were compiled."""

        def measure(compiled: bool) -> None:
            options = self.options(compiled)
            shown = command_line("benchmark", options)  # in the report
            benchmark.run(replace(options, output=replace(options.output, command_line=shown)))

        compiled = self.run.compiled_or_eager(self.compiled, measure)
        return read_json(self.run.options.folder / RESULTS)["methods"]["medusa"] | {"compiled": compiled}


@dataclass(frozen=True)
class ExportStage:
    """The stage that writes the heads in the format of the server that `--for` names."""

    run: Run
    name = "export"

    @property
    def title(self) -> str:
        return f"The heads in the format of {self.run.options.purpose}"

    @property
    def options(self) -> ExportOptions:
        options = self.run.options
        return ExportOptions(
            heads=str(options.folder),
            to=options.purpose,
            out=str(options.folder / options.purpose),
            overwrite=True,
            backbone=options.model,
            load=options.load,
            output=options.output_to(self.run.work / "export.json"),
        )

    @property
    def command(self) -> str:
        return command_line("export", self.options)

    def work(self) -> Json:
        export.run(self.options)
        return read_json(Path(str(self.options.output.json)))


def command_line(command: str, options: Options) -> str:
    """Return the command with these options, as a user types it."""
    return shlex.join(["medusa", command, *as_arguments(options)])
