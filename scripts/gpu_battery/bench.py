"""Stages that measure: the trained heads compared with plain decoding and `generate`, and `medusa verify`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.settings import Settings
from decode.texts import Result, tau
from medusa import Tree
from medusa.heads import KINDS
from medusa.heads.independent import MedusaHeads
from medusa.loading import LoadOptions, load_backbone
from medusa.records.sources import read_records
from medusa.tree import load_tree
from scripts.gpu_battery.curves import NUM_HEADS
from scripts.gpu_battery.run import Figure, Run
from scripts.gpu_battery.steps import StepClock, forward_timer, profile_steps, target_of

MAIN_KIND = "markov"  # whose heads most stages use
STATIC = {"cache_implementation": "static"}
BASELINE = "plain, compiled"


def benchmark(run: Run) -> None:
    """Measure tau and tokens per second of plain decoding, of decoding with heads, and of `generate`."""
    bench = Bench(run)
    for number, (how, way) in enumerate(run.ways.items()):
        bench.measure_way(how, way, [MAIN_KIND])
        if number == 0:
            bench.prepare_forwards()
            bench.compare_with_targets()
    generating = {"compiled": STATIC, "static cache": STATIC | {"disable_compile": True}, "eager": {}}
    makers = {name: partial(transformers_method, bench.model, bench.eager, **way) for name, way in generating.items()}
    bench.measure({f"generate, {name}": make for name, make in makers.items()})


def kinds(run: Run) -> None:
    """Measure tau and tokens per second of compiled decoding with heads of each kind."""
    bench = Bench(run)
    how, way = next(iter(run.ways.items()))
    bench.measure_way(how, way, list(KINDS))


class Bench:
    """Measures decoding methods on the prompts that the stage `backbone` wrote."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = load_backbone(str(run.backbone), LoadOptions(run.dtype_name, run.device)).model
        self.prompts = [record.input_ids for record in read_records(str(run.prompts))]
        self.eager = Settings(max_new_tokens=run.scale.new_tokens, ignore_eos=True)
        self.methods: dict[str, Method] = {}
        self.figures: dict[str, Figure] = {}
        self.texts: list[list[int]] | None = None  # of the first method: plain decoding
        self.heads: dict[str, MedusaHeads] = {}  # by their kind
        self.forwards: dict[str, Callable[[], float]] = {}  # timers of T(n), by the name of the tree; "" is T(1)

    def method_of(self, kind: str, tree: str, settings: Settings) -> Method:
        """Make a method that decodes with the heads of this kind, on the tree that the scale calls `tree`."""
        if kind not in self.heads:  # loaded once, because compiled steps belong to the heads that they were made for
            heads = MedusaHeads.from_pretrained(self.run.heads / kind)
            self.heads[kind] = heads.to(self.run.device, self.model.dtype)
        return medusa_method(self.model, self.heads[kind], settings, tree=self.run.scale.trees[tree])

    def measure_way(self, how: str, way: dict[str, object], kinds: Sequence[str]) -> None:
        """Measure plain decoding and decoding with heads of these kinds, with the options `way`."""
        settings = replace(self.eager, **way)
        makers = {f"plain, {how}": partial(plain_method, self.model, settings)}
        for tree, kind in itertools.product(self.run.scale.trees, kinds):
            makers[f"{kind}, {tree}, {how}"] = partial(self.method_of, kind, tree, settings)
        self.measure(makers)

    def measure(self, makers: Mapping[str, Callable[[], Method]]) -> None:
        """Make methods and decode one prompt with each, which compiles what it needs; then time those that can."""
        first_seconds = {}
        for name, make in makers.items():
            with self.run.attempt(method=name):
                method, start = make(), time.monotonic()
                method(self.prompts[:1])
                first_seconds[name] = round(time.monotonic() - start, 1)
                self.methods[name] = method
        self.time(first_seconds)

    def prepare_forwards(self) -> None:
        """Compile the forwards alone over the nodes of each tree, and over one node."""
        times = 1, len(self.prompts[0]), self.run.scale.new_tokens
        trees = {name: load_tree(tree, NUM_HEADS) for name, tree in self.run.scale.trees.items()}
        for name, tree in {"": Tree.chain(0), **trees}.items():
            with self.run.attempt(forward=tree.num_nodes):
                self.forwards[name] = forward_timer(self.model, tree, *times)

    def time(self, first_seconds: Mapping[str, float]) -> None:
        """Decode all prompts with these methods in turn, in several rounds; record a figure for each method.

        The first prompt has taken `first_seconds`. Tokens per second count the prefill, `step_ms` does not. Speedups
        are over compiled plain decoding."""
        clocks = {name: StepClock() for name in first_seconds}
        rates: dict[str, list[float]] = {name: [] for name in first_seconds}
        results: dict[str, list[Result]] = {}
        for _, name in itertools.product(range(self.run.scale.rounds), first_seconds):
            with self.run.attempt(method=name):
                method, clock = self.methods[name], clocks[name]
                results[name] = [result for prompt in self.prompts for result in method([prompt], clock.start())]
                seconds = sum(result.seconds for result in results[name])
                rates[name].append(sum(len(result.new_ids) for result in results[name]) / seconds)
        state = self.run.clocks()
        for name, found in results.items():
            with self.run.attempt(method=name):
                texts = [result.new_ids for result in found]
                self.texts = self.texts or texts
                equal = sum(a == b for a, b in zip(texts, self.texts, strict=True))
                figure: Figure = {"method": name, "first_seconds": first_seconds[name]}
                figure["tokens_per_second"] = statistics.median(rates[name])
                figure |= {"rounds": rates[name], "tau": tau(found) or None, "step_ms": clocks[name].ms}
                self.figures[name] = figure
                if BASELINE in self.figures:
                    figure["speedup"] = figure["tokens_per_second"] / self.figures[BASELINE]["tokens_per_second"]
                self.run.keep(**figure, equal_texts=f"{equal} of {len(texts)}", **state)

    def compare_with_targets(self) -> None:
        """Record the speedup with each tree in the most important way beside its target (`target_of`)."""
        times = {name: timer() for name, timer in self.forwards.items()}
        for tree in self.run.scale.trees:
            name = f"{MAIN_KIND}, {tree}, {next(iter(self.run.ways))}"
            with self.run.attempt(target=name):
                self.compare_with_target(name, times[""], times[tree])
                self.trace(name)
        with self.run.attempt(traced=BASELINE):
            self.trace(BASELINE)

    def compare_with_target(self, name: str, one: float, forward: float) -> None:
        """Record a speedup and its target for T(1) and T(n) in milliseconds."""
        figure = self.figures[name]
        found = {"compared": name, "tau": figure["tau"], "speedup": figure["speedup"]}
        found |= {"nodes": self.methods[name].source.tree.num_nodes, "forward_ms": forward, "forward_of_1_ms": one}
        found["target"] = target_of(figure["tau"], one, forward)
        found["steps_alone"] = figure["tau"] * self.figures[BASELINE]["step_ms"] / figure["step_ms"]
        self.run.keep(**found, met=figure["speedup"] >= found["target"])

    def trace(self, name: str) -> None:
        """Keep a profile of steps, which shows where their time goes."""
        trace = self.run.output / "traces" / f"{name.replace(', ', '-').replace(' ', '_')}.json.gz"
        seen = profile_steps(self.methods[name], self.prompts[:1], self.run.on_gpu, trace)
        self.run.keep(traced=name, trace=str(trace.relative_to(self.run.output)), **seen)


def verify(run: Run) -> None:
    """Run `medusa verify` in float32 and bfloat16: equal greedy texts, and chi-square tests of sampled tokens."""
    for dtype in ("float32", "bfloat16"):
        tree, report = next(iter(run.scale.trees.values())), run.output / f"verify_{dtype}.html"
        argv = ["--backbone", run.backbone, "--heads", run.heads / MAIN_KIND, "--prompts", run.prompts]
        argv += ["--tree", tree, "--max-new-tokens", run.scale.new_tokens, "--draws", run.scale.draws]
        argv += ["--sampled-prompts", run.scale.sampled_prompts, "--dtype", dtype, "--device", run.device]
        argv += ["--report", report, "--overwrite", "--quiet"]
        with run.attempt(dtype=dtype):
            found = run.medusa("verify", *argv, result=f"verify_{dtype}")
            greedy, about = found["greedy"], {"dtype": dtype, "passed": found["passed"]}
            equal = f"{greedy['equal']} of {greedy['prompts']}"
            run.keep(**about, equal_texts=equal, rounding_ties=greedy["rounding_ties"])
            if not found["passed"]:
                raise RuntimeError(f"there is evidence against equality; see {report}")
    run.require_no_errors()
