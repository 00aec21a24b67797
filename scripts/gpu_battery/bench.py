"""Stages that measure: the trained heads compared with plain decoding and `generate`, and `medusa verify`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.results import tau
from decode.settings import Settings
from medusa import Tree
from medusa.config import KINDS
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
    for how, way in run.ways.items():
        bench.measure_way(how, way, [MAIN_KIND])
    generating = {"compiled": STATIC, "static cache": STATIC | {"disable_compile": True}, "eager": {}}
    for name, options in generating.items():
        bench.measure(f"generate, {name}", transformers_method(bench.model, bench.eager, **options))
    bench.prepare_forwards()
    bench.compare_with_targets()


def kinds(run: Run) -> None:
    """Measure tau and tokens per second of compiled decoding with heads of each kind."""
    bench = Bench(run)
    how, way = next(iter(run.ways.items()))
    bench.measure_way(how, way, list(KINDS))


class Bench:
    """Measures decoding methods, one after another, on the prompts that the stage `backbone` wrote."""

    def __init__(self, run: Run) -> None:
        self.run = run
        with run.busy():
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
        self.measure(f"plain, {how}", plain_method(self.model, settings))
        for tree, kind in itertools.product(self.run.scale.trees, kinds):
            name = f"{kind}, {tree}, {how}"
            with self.run.attempt(method=name):
                self.measure(name, self.method_of(kind, tree, settings))

    def measure(self, name: str, method: Method) -> None:
        """Decode one prompt, which compiles what the method needs; then time the method and record its figure."""
        with self.run.attempt(method=name):
            with self.run.busy():
                start = time.monotonic()
                method(self.prompts[:1])
                seconds = round(time.monotonic() - start, 1)
            self.methods[name] = method
            self.time(name, seconds)

    def prepare_forwards(self) -> None:
        """Compile the forwards alone over the nodes of each tree, and over one node."""
        times = 1, len(self.prompts[0]), self.run.scale.new_tokens
        trees = {name: load_tree(tree, NUM_HEADS) for name, tree in self.run.scale.trees.items()}
        for name, tree in {"": Tree.chain(0), **trees}.items():
            with self.run.attempt(forward=tree.num_nodes), self.run.busy():
                self.forwards[name] = forward_timer(self.model, tree, *times)

    def time(self, name: str, seconds: float) -> None:
        """Decode all prompts in several rounds, and record the figure; the first prompt has taken `seconds`.

        Tokens per second count the prefill, `step_ms` does not. Speedups are over compiled plain decoding."""
        method = self.methods[name]
        figure, clock, rates = Figure(method=name, first_seconds=seconds), StepClock(), []
        with self.run.alone():
            for _ in range(self.run.scale.rounds):
                results = [result for prompt in self.prompts for result in method([prompt], clock.start())]
                rates.append(sum(len(r.new_ids) for r in results) / sum(r.seconds for r in results))
            clocks = self.run.clocks()
        figure |= {"tokens_per_second": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}
        figure |= clocks | {"tau": tau(results) or None, "step_ms": clock.ms}
        self.figures[name] = figure
        if BASELINE in self.figures:
            figure["speedup"] = figure["tokens_per_second"] / self.figures[BASELINE]["tokens_per_second"]
        texts = [result.new_ids for result in results]
        self.texts = self.texts or texts
        equal = sum(a == b for a, b in zip(texts, self.texts, strict=True))
        self.run.keep(**figure, equal_texts=f"{equal} of {len(texts)}")

    def compare_with_targets(self) -> None:
        """Record the speedup with each tree in the most important way beside its target (`target_of`)."""
        with self.run.alone():
            times = {name: timer() for name, timer in self.forwards.items()}
        for tree in self.run.scale.trees:
            name = f"{MAIN_KIND}, {tree}, {next(iter(self.run.ways))}"
            with self.run.attempt(target=name):
                self.compare_with_target(name, times[""], times[tree])

    def compare_with_target(self, name: str, one: float, forward: float) -> None:
        """Record a speedup and its target for T(1) and T(n) in milliseconds; if it is missed, keep a trace of steps."""
        figure, method = self.figures[name], self.methods[name]
        target = target_of(figure["tau"], one, forward)
        found = {"compared": name, "tau": figure["tau"], "speedup": figure["speedup"]}
        found |= {"nodes": method.source.tree.num_nodes, "forward_ms": forward, "forward_of_1_ms": one}
        without_prefills = figure["tau"] * self.figures[BASELINE]["step_ms"] / figure["step_ms"]
        found |= {"target": target, "steps_alone": without_prefills}
        found["met"] = figure["speedup"] >= target
        self.run.keep(**found)
        if not found["met"]:
            trace = self.run.output / "traces" / f"{name.replace(', ', '-').replace(' ', '_')}.json.gz"
            with self.run.alone():
                seen = profile_steps(method, self.prompts[:1], self.run.on_gpu, trace)
            self.run.keep(missed=name, trace=str(trace.relative_to(self.run.output)), **seen)


def verify(run: Run) -> None:
    """Run `medusa verify` in float32 and bfloat16: equal greedy texts, and chi-square tests of sampled tokens."""
    for dtype in ("float32", "bfloat16"):
        tree, report = next(iter(run.scale.trees.values())), run.output / f"verify_{dtype}.html"
        argv = ["--backbone", run.backbone, "--heads", run.heads / MAIN_KIND, "--prompts", run.prompts]
        argv += ["--tree", tree, "--max-new-tokens", run.scale.new_tokens, "--draws", run.scale.draws]
        argv += ["--sampled-prompts", run.scale.sampled_prompts, "--dtype", dtype, "--device", run.device]
        argv += ["--report", report, "--overwrite", "--quiet"]
        with run.attempt(dtype=dtype):
            with run.busy():
                found = run.medusa("verify", *argv, result=f"verify_{dtype}")
            greedy, about = found["greedy"], {"dtype": dtype, "passed": found["passed"]}
            equal = f"{greedy['equal']} of {greedy['prompts']}"
            run.keep(**about, equal_texts=equal, rounding_ties=greedy["rounding_ties"])
            if not found["passed"]:
                raise RuntimeError(f"there is evidence against equality; see {report}")
    run.require_no_errors()
