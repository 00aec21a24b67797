"""Make heads for a real model, and measure them: tau, speed, the text engine, and the plan beside what happened.

    python scripts/real_model.py HuggingFaceTB/SmolLM2-135M-Instruct --data data --output runs/real
    python scripts/real_model.py ./model --data data --output runs/real --only speed report
    python scripts/real_model.py ./model --data data --output runs/quick --quick

The data are three folders, as `make real` fetches them: gsm8k (openai/gsm8k on the Hub, split test), humaneval
(openai/openai_humaneval) and mt_bench (question.jsonl of lm-sys/FastChat). All of MT-bench and the last 40 questions of
the others are set aside; heads learn from the model's answers to the rest and to --prompts.

Each stage keeps its result in fit.json, and the same command continues an interrupted run. report.md has the tables.
With one CPU thread, all times are CPU times, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import random
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from time import perf_counter, process_time

import torch
import yaml
from pydantic import TypeAdapter

from compare_kinds import KindsOptions, take_turns
from decode.bench.calibration.stored import Calibration, TooFewStepsError
from decode.bench.machine import commit, machine
from decode.settings import Settings
from medusa.backbone import Backbone
from medusa.commands.calibrate import CalibrateOptions, find_tree
from medusa.commands.cpu import Tuned
from medusa.commands.distill.tasks import digest, tasks_of
from medusa.commands.fit.options import FitOptions, HeadsChoice, choose_heads
from medusa.commands.fit.plan import REPEATS, costs_of, make_plan, text_settings
from medusa.commands.fit.probe import probe
from medusa.commands.fit.prompts import write_prompts
from medusa.commands.fit.stages import TRAIN, Run, recipe, text_stage, write_sides
from medusa.commands.fit.state import FitState, remove_earlier
from medusa.commands.models import Opened, fitted_heads, open_models
from medusa.commands.options import Models, ModelsWithHeads, Output, Prompts, RuntimeOptions
from medusa.commands.prompting import prompt_form
from medusa.errors import RequestError, choose_one_of
from medusa.files import Json
from medusa.heads import KINDS
from medusa.heads.independent import MedusaHeads
from medusa.interruptions import interruptible
from medusa.loading import BackboneFiles
from medusa.memory import release
from medusa.options import LoadOptions
from medusa.records.record import Record
from real_measure import lengthened, methods_of, read_prompts, taus, text_speeds
from real_report import write_report
from script_tools import run_script, script_parser
from train.config import HeadsConfig
from train.recipe import parse_recipe
from train.run import train
from train.sections import validated

STAGES = ("text", "train", "calibrate", "tau", "speed", "long", "engine", "curve", "report")
TEMPERATURES = (0.7, 1.0)  # of samples whose speed is measured, beside greedy texts
CURVE_NODES = 16


@dataclass(frozen=True)
class Sizes:
    """How much each stage does."""

    minutes: tuple[float, float]  # CPU minutes to write text, and to train each kind of heads
    answer: int  # tokens of an answer to learn from, at most
    tau: tuple[int, int]  # prompts of each set at most, and tokens of an answer
    nodes: tuple[int, ...]  # of the trees whose tau is measured
    speed: tuple[int, int, int]  # prompts of each set, tokens of an answer, and rounds
    long: tuple[int, int]  # long prompts of each set, and the tokens of each at least
    calibration: tuple[int, int]  # prompts, and tokens of an answer
    engine: tuple[int, int, int]  # prompts, tokens of an answer, and rounds
    curve: int  # tokens that the first heads of the curve read in training; each next one reads twice as many


FULL = Sizes((15, 12), 256, (80, 48), (8, 16, 64), (12, 96, 1), (4, 2_000), (16, 64), (48, 128, 2), 100_000)
QUICK = Sizes((0.75, 0.75), 128, (2, 24), (8, 16, 64), (2, 24, 1), (1, 500), (14, 64), (24, 32, 1), 8_000)


class RealModel:
    """A run: its options, its prompts, and the results of its finished stages."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.sizes = args, QUICK if args.quick else FULL
        text, training = self.sizes.minutes
        self.minutes = args.minutes_of_text or text, args.minutes_of_training or training
        self.sides, self.tests = read_prompts(args.data, args.prompts)
        names = ("model", "kinds", "dtypes", "threads", "quick")
        request = {name: getattr(args, name) for name in names} | {"prompts": digest([*self.sides.train])}
        request |= dict(zip(("minutes_of_text", "minutes_of_training"), self.minutes, strict=True))
        self.state = FitState(args.output, request, args.overwrite, shlex.join(["python", *sys.argv]))
        self.runtime, self.quiet = RuntimeOptions(threads=args.threads[0]), Output(quiet=True)
        self.work = self.state.work

    def stage(self, name: str, work: Callable[[], Json]) -> Json:
        """Do the work of a stage, unless it is finished, and keep the result with its times; return the result.

        A stage that --only leaves out must be finished."""
        if name not in self.state.stages:
            kind = name.split()[0]
            if kind in STAGES and kind not in self.args.only:
                raise RequestError(f"stage {name} is not finished, and others need it; add {kind} to --only")
            print(f"{name} ...", file=sys.stderr)
            release()  # the memory may hold the model only once
            self.runtime.prepare()
            unfinished = self.state.content.setdefault("unfinished", {})
            before, cpu, wall = unfinished.get(name, [0.0, 0.0]), process_time(), perf_counter()
            try:
                found = work()
            except BaseException:  # what an interrupted stage has used counts when it is finished later
                unfinished[name] = [before[0] + process_time() - cpu, before[1] + perf_counter() - wall]
                self.state.write()
                raise
            unfinished.pop(name, None)
            times = {"cpu_seconds": before[0] + process_time() - cpu, "seconds": before[1] + perf_counter() - wall}
            self.state.finish(name, found | times)
        return self.state.stages[name]

    def make(self) -> None:
        """Do the stages that are asked for and not finished."""
        dtype, *others = self.args.dtypes
        last = max((STAGES.index(name) for name in self.args.only if name != "report"), default=-1)
        if last < 0 and "plan" not in self.state.stages:
            raise RequestError(f"{self.args.output} has no finished stage to report; leave out --only report")
        if last >= 0:
            self.stage("plan", self.plan)
            self.stage("text", self.text)
        if last >= STAGES.index("train"):
            for choice in self.choices:
                self.stage(f"train {choice.name}", lambda c=choice: self.train(c))
        if last >= STAGES.index("calibrate"):
            self.measure(dtype, others)

    def measure(self, dtype: str, others: Sequence[str]) -> None:
        """Do the stages after training. Others than the first dtype count for the speed of the fastest kind only."""
        for kind in self.args.kinds:
            self.stage(f"calibrate {kind} {dtype}", lambda k=kind: self.calibrate(k, dtype))
        best = self.fastest()
        for other in others:
            self.stage(f"calibrate {best} {other}", lambda d=other: self.calibrate(best, d))
        if "tau" in self.args.only:
            for kind in self.args.kinds:
                self.stage(f"tau {kind}", lambda k=kind: self.tau(self.work / k, k, self.sizes.nodes))
        if "speed" in self.args.only:
            for where in self.speeds():
                self.stage("speed {} {} {}".format(*where), lambda w=where: self.speed(*w))
        if "long" in self.args.only:
            self.stage("long", self.long)
        if "engine" in self.args.only:
            self.stage("engine", self.engine)
        if "curve" in self.args.only:
            for tokens in self.curve_tokens(self.state.stages[f"train {best}"]["tokens_read"]):
                self.stage(f"curve {tokens}", lambda n=tokens: self.curve(best, n))

    @property
    def fit(self) -> FitOptions:
        """The options of `medusa fit` that write the same text and train the same heads."""
        return FitOptions(
            model=self.args.model,
            prompts=Prompts(prompts=str(self.work / TRAIN)),
            minutes=sum(self.minutes),
            tokens=self.sizes.answer,
            out=str(self.work / "fit"),
            load=LoadOptions(dtype=self.args.dtypes[0]),
            runtime=self.runtime,
            output=Output(),
        )

    @cached_property
    def choices(self) -> list[HeadsChoice]:
        """The kinds of heads as `medusa fit` trains them; `eagle` as for servers, which reads three layers."""
        found = []
        for name in self.args.kinds:
            kind, settings = kind_and_settings(name)
            purpose = "vllm" if kind == "eagle" else "transformers"
            choice = choose_heads(replace(self.fit, kind=kind, purpose=purpose))[0]
            found.append(choice._replace(name=name, heads=choice.heads | settings))
        return found

    def plan(self) -> Json:
        """Probe the model, and plan as `medusa fit` does; the texts fill the minutes of text."""
        options, files = self.fit, BackboneFiles(self.args.model, self.fit.load)
        loaded = files.load()
        tasks = tasks_of(
            self.sides.train, files.tokenizer, prompt_form(None, files.tokenizer, options.model), None, None
        )
        found = probe(Tuned(loaded), tasks, text := text_settings(options, Backbone(loaded.model).context))
        costs = [costs_of(choice, loaded, found) for choice in self.choices]
        plan = make_plan(options, found, costs, len(tasks), 0)
        most = text.max_new_tokens
        fitting = (
            n for n in range(REPEATS * len(tasks), 1, -1) if found.writing_seconds(n, most) <= 60 * self.minutes[0]
        )
        texts = next(fitting, 1)
        tokens = int(texts * found.turns * found.answer_tokens)
        plan = replace(plan, texts=texts, text_tokens=tokens, text_seconds=found.writing_seconds(texts, most))
        self.state.keep_plan(found, replace(plan, training_minutes=self.minutes[1]), self.choices)
        about = {"commit": commit(), "model": loaded.name, "parameters": found.parameters, **asdict(machine())}
        return self.state.stages["plan"] | {"machine": about}

    @property
    def run(self) -> Run:
        """The run of `medusa fit` by the plan."""
        assert self.state.planned is not None
        found, plan, _ = self.state.planned
        return Run(self.fit, self.work, plan, found)

    def text(self) -> Json:
        """Let the model answer the training prompts."""
        resumed = (self.work / "text.jsonl").exists()
        write_sides(self.run, self.sides)
        return text_stage(self.run).work() | {"resumed": resumed}

    def train(self, choice: HeadsChoice, name: str = "", budget: Json | None = None) -> Json:
        """Train heads on the text for the CPU minutes, or for another `budget`."""
        content, plan = recipe(self.run, choice), self.run.plan
        content["output_dir"] = str(self.work / (name or choice.name))
        del content["training"]["max_minutes"]
        content["training"] |= budget or {"max_cpu_minutes": self.minutes[1]}
        figures = train(parse_recipe(content, "recipe"), resume="auto")
        return figures.to_dict() | {"tokens_read": figures.steps * plan.rows * plan.sequence_length}

    def options(self, name: str, tokens: int, dtype: str, temperature: float = 0.0, rounds: int = 1) -> KindsOptions:
        """The options of a comparison on the prompts in a file of the work folder."""
        return KindsOptions(
            models=Models(backbone=self.args.model),
            load=LoadOptions(dtype=dtype),
            prompts=Prompts(prompts=str(self.work / name)),
            settings=Settings(max_new_tokens=tokens, temperature=temperature),
            heads=(),
            rounds=rounds,
            runtime=self.runtime,
            output=self.quiet,
        )

    def calibrate(self, kind: str, dtype: str) -> Json:
        """Find the fastest tree, and the fastest mix with n-grams, on training prompts."""
        prompts, tokens = self.sizes.calibration
        file = self.work / "calibration.jsonl"
        write_prompts(file, self.sides.train[:prompts])
        options = CalibrateOptions(
            models=ModelsWithHeads(backbone=self.args.model, heads=str(self.work / kind)),
            load=LoadOptions(dtype=dtype),
            prompts=Prompts(prompts=str(file)),
            settings=Settings(max_new_tokens=tokens),
            runtime=self.runtime,
        )
        try:
            return {"found": asdict(find_tree(options))}
        except TooFewStepsError as error:
            return {"refused": str(error)}

    def calibration(self, kind: str, dtype: str) -> Calibration | None:
        """The stored calibration of a kind; `None` if the texts were too short for one."""
        held = self.state.stages[f"calibrate {kind} {dtype}"].get("found")
        return None if held is None else TypeAdapter(Calibration).validate_python(held)

    def fastest(self) -> str:
        """The kind of heads with the most tokens per second in calibration."""
        found = {kind: self.calibration(kind, self.args.dtypes[0]) for kind in self.args.kinds}
        return max(found, key=lambda kind: 0.0 if (its := found[kind]) is None else its.of_heads.tokens_per_second)

    def test_prompts(self, most: int) -> list[Record]:
        """The first `most` prompts of each set that were set aside."""
        return [record for records in self.tests.values() for record in records[:most]]

    def open(self, options: KindsOptions, records: Sequence[Record]) -> Opened:
        """Write the prompts to the file that the options name, and load the model."""
        write_prompts(Path(str(options.prompts.prompts)), records)
        return open_models(options, options.prompts.read())

    def tau(self, folder: Path, kind: str, nodes: Sequence[int]) -> Json:
        """Decode the prompts of each set greedily on dynamic trees of `nodes` nodes; return tau with intervals."""
        dtype, (most, tokens) = self.args.dtypes[0], self.sizes.tau
        opened = self.open(self.options("tau.jsonl", tokens, dtype), self.test_prompts(most))
        heads = fitted_heads(MedusaHeads.from_pretrained(folder), opened.loaded)
        return {"tau": taus(opened, heads, nodes, self.calibration(kind, dtype))}

    def speeds(self) -> Iterator[tuple[str, int, float]]:
        """The dtypes, numbers of threads and temperatures at which speed is measured."""
        dtypes, threads = self.args.dtypes, self.args.threads
        yield from ((dtype, count, 0.0) for dtype in dtypes for count in threads)
        yield from ((dtypes[0], threads[0], at) for at in TEMPERATURES)

    def speed(self, dtype: str, threads: int, temperature: float) -> Json:
        """Measure all methods in turns: in the first place all kinds of heads, elsewhere only the fastest one."""
        most, tokens, rounds = self.sizes.speed
        options = self.options("speed.jsonl", tokens, dtype, temperature, rounds)
        first = (dtype, threads, temperature) == next(self.speeds())
        kinds = self.args.kinds if first else [self.fastest()]
        return self.methods(replace(options, runtime=RuntimeOptions(threads=threads)), self.test_prompts(most), kinds)

    def long(self) -> Json:
        """Measure the fastest kind on long prompts: before each question stand others, with the model's answers."""
        (most, length), (_, tokens, rounds) = self.sizes.long, self.sizes.speed
        options = self.options("long.jsonl", tokens, self.args.dtypes[0], rounds=rounds)
        tokenizer = BackboneFiles(self.args.model, self.fit.load).tokenizer
        records = lengthened(self.test_prompts(most), self.work / "text.jsonl", tokenizer, length)
        return self.methods(options, records, [self.fastest()]) | {"tokens": length}

    def methods(self, options: KindsOptions, records: Sequence[Record], kinds: Sequence[str]) -> Json:
        """Decode prompts with all methods in turns, among them these kinds of heads."""
        opened, best, dtype = self.open(options, records), self.fastest(), str(options.load.dtype)
        heads = {kind: MedusaHeads.from_pretrained(self.work / kind) for kind in kinds}
        methods = methods_of(opened, heads, {kind: self.calibration(kind, dtype) for kind in kinds}, best)
        found = {name: its.to_json() for name, its in take_turns(options, opened, methods).items()}
        for its in found.values():
            del its["prompts"], its["tau_by_position"]
        return {"methods": found, "threads": torch.get_num_threads(), "best": best}

    def engine(self) -> Json:
        """Let the engine of `distill` and `model.generate` with 16 rows answer the same prompts in turns."""
        count, tokens, rounds = self.sizes.engine
        mixed = self.test_prompts(ceil(count / len(self.tests)))[:count]
        random.Random(0).shuffle(mixed)
        opened = self.open(self.options("engine.jsonl", tokens, self.args.dtypes[0]), mixed)
        return {"tokens_per_second": text_speeds(opened, rounds), "prompts": len(mixed), "tokens": tokens}

    def curve_tokens(self, read: int) -> Iterator[int]:
        """The tokens that the heads of the curve read in training: less than the finished heads, which end it."""
        tokens = self.sizes.curve
        while tokens < 0.75 * read:
            yield tokens
            tokens *= 2

    def curve(self, kind: str, tokens: int) -> Json:
        """Train heads on `tokens` tokens of the text, with a whole schedule of learning rates, and measure tau."""
        choice = next(choice for choice in self.choices if choice.name == kind)
        steps, name = max(round(tokens / (self.run.plan.rows * self.run.plan.sequence_length)), 1), f"curve-{tokens}"
        trained = self.train(choice, name, {"max_steps": steps})
        return self.tau(self.work / name, kind, [CURVE_NODES]) | {"tokens_read": trained["tokens_read"]}


def names(text: str) -> list[str]:
    """Read names that commas separate."""
    if not (found := [name for name in text.split(",") if name]):
        raise argparse.ArgumentTypeError("is empty; give at least one name")
    return found


def kind_and_settings(text: str) -> tuple[str, Json]:
    """Read a kind of heads with its settings: `dflash:edges=none:layers=2`; raise RequestError for anything else."""
    kind, *settings = text.split(":")
    if kind not in KINDS:
        raise RequestError(f"--kinds has {text!r}; {choose_one_of(kind, KINDS)}")
    pairs = [setting.partition("=") for setting in settings]
    if not all(key and value for key, _, value in pairs):
        raise RequestError(f"--kinds has {text!r}; write KIND:KEY=VALUE, with keys of `heads` in a recipe")
    given = {key: yaml.safe_load(value) for key, _, value in pairs}
    validated(HeadsConfig, {"kind": kind, **given}, f"--kinds has {text!r}: ", "heads.")
    return kind, given


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("model", metavar="MODEL", help="a folder, a GGUF file, or a Hub id")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the folders of prompts")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="keep all results here")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="FILE", help="more training prompts")
    parser.add_argument("--minutes-of-text", type=float, metavar="M", help="CPU minutes (default: 15)")
    parser.add_argument("--minutes-of-training", type=float, metavar="M", help="for each kind (default: 12)")
    parser.add_argument("--kinds", type=names, default=["markov", "medusa", "eagle"], metavar="A,B:KEY=VALUE")
    parser.add_argument("--dtypes", type=names, default=["bfloat16", "float32"], metavar="A,B", help="first: for all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N", help="more: for speed only")
    parser.add_argument("--only", nargs="+", choices=STAGES, default=STAGES, help="run only these stages")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the text and training, few prompts")
    parser.add_argument("--overwrite", action="store_true", help="delete an earlier run in DIR and start again")
    args = parser.parse_args(argv)
    if any(minutes is not None and minutes <= 0 for minutes in (args.minutes_of_text, args.minutes_of_training)):
        raise RequestError("--minutes-of-text and --minutes-of-training must be greater than 0")
    for kind in args.kinds:
        kind_and_settings(kind)
    for dtype in args.dtypes:
        LoadOptions(dtype=dtype)  # RequestError: there is no such dtype
    run = RealModel(args)
    if args.overwrite:
        remove_earlier(args.output, [])
    with interruptible(lambda: f"{run.state.path} keeps the finished stages, and the same command continues"):
        run.make()
        print(write_report(run.state, list(run.speeds())))


if __name__ == "__main__":
    run_script(main)
