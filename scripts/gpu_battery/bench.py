"""Stages that measure: the trained heads compared with plain decoding and `generate`, and `medusa verify`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.results import tau
from decode.settings import Settings
from medusa import Tree
from medusa.config import KINDS
from medusa.heads.independent import MedusaHeads
from medusa.loading import LoadOptions, load_backbone
from medusa.records.sources import read_records
from scripts.gpu_battery.run import Figure, Run
from scripts.gpu_battery.steps import StepClock, forward_ms, profile_steps, target_of

MAIN_KIND = "markov"  # whose heads most stages use
STATIC = {"cache_implementation": "static"}
BASELINE = "plain, compiled"


def benchmark(run: Run) -> None:
    """Measure tau and tokens per second of plain decoding, of decoding with heads, and of `generate`."""
    bench = Bench(run)
    generating = {"static cache": STATIC | {"disable_compile": True}, "eager": {}}
    for how, way in run.ways.items():
        settings = replace(bench.eager, **way)
        bench.measure(f"plain, {how}", lambda settings=settings: plain_method(bench.model, settings))
        for tree in run.scale.trees:
            figure = bench.measure_heads(MAIN_KIND, tree, how, settings)
            if figure is not None and bench.is_main(how):
                with run.attempt(target=figure["method"]):
                    bench.compare_with_target(figure, tree, settings)
        if bench.is_main(how):
            bench.measure_generate("compiled", STATIC)
    for name, options in generating.items():
        bench.measure_generate(name, options)


def kinds(run: Run) -> None:
    """Measure tau and tokens per second of compiled decoding with heads of each kind."""
    bench = Bench(run)
    how, way = next(iter(run.ways.items()))
    settings = replace(bench.eager, **way)
    bench.measure(BASELINE, lambda: plain_method(bench.model, settings))
    for tree in run.scale.trees:
        for kind in KINDS:
            bench.measure_heads(kind, tree, how, settings)


class Bench:
    """Measures decoding methods, one after another, on the prompts that the stage `backbone` wrote."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = load_backbone(str(run.backbone), LoadOptions(run.dtype_name, run.device)).model
        self.prompts = [record.input_ids for record in read_records(str(run.prompts))]
        self.eager = Settings(max_new_tokens=run.scale.new_tokens, ignore_eos=True)
        self.baseline: Figure | None = None  # the figure of compiled plain decoding
        self.texts: list[list[int]] | None = None  # of the first method: plain decoding
        self.heads: dict[str, MedusaHeads] = {}  # by their kind
        self.forward_of_one: float | None = None  # T(1) in milliseconds

    def method_of(self, kind: str, tree: str, settings: Settings) -> Method:
        """Make a method that decodes with the heads of this kind, on the tree that the scale calls `tree`."""
        if kind not in self.heads:  # loaded once, because compiled steps belong to the heads that they were made for
            heads = MedusaHeads.from_pretrained(self.run.heads / kind)
            self.heads[kind] = heads.to(self.run.device, self.model.dtype)
        return medusa_method(self.model, self.heads[kind], settings, tree=self.run.scale.trees[tree])

    def is_main(self, how: str) -> bool:
        """Whether this is the most important way to run a step."""
        return how == next(iter(self.run.ways))

    def measure_generate(self, name: str, options: dict[str, object]) -> None:
        """Measure transformers' `generate` with these options."""
        self.measure(f"generate, {name}", lambda: transformers_method(self.model, self.eager, **options))

    def measure_heads(self, kind: str, tree: str, how: str, settings: Settings) -> Figure | None:
        """Measure the heads of this kind; return the figure, or `None` after an error."""
        return self.measure(f"{kind}, {tree}, {how}", lambda: self.method_of(kind, tree, settings))

    def measure(self, name: str, make: Callable[[], Method]) -> Figure | None:
        """Decode one prompt as a warm-up, then all prompts in several rounds; record and return the figure.

        Tokens per second count the prefill, `step_ms` does not. Speedups are over compiled plain decoding."""
        with self.run.attempt(method=name):
            method, start, clock, rates = make(), time.monotonic(), StepClock(), []
            method(self.prompts[:1])
            figure: Figure = {"method": name, "first_seconds": round(time.monotonic() - start, 1)}
            with self.run.alone():
                for _ in range(self.run.scale.rounds):
                    results = [result for prompt in self.prompts for result in method([prompt], clock.start())]
                    rates.append(sum(len(r.new_ids) for r in results) / sum(r.seconds for r in results))
            figure |= {"tokens_per_second": statistics.median(rates), "slowest": min(rates), "fastest": max(rates)}
            figure |= self.run.clocks() | {"tau": tau(results) or None, "step_ms": clock.ms}
            if name == BASELINE:
                self.baseline = figure
            if self.baseline is not None:
                figure["speedup"] = figure["tokens_per_second"] / self.baseline["tokens_per_second"]
            texts = [result.new_ids for result in results]
            self.texts = self.texts or texts
            equal = sum(a == b for a, b in zip(texts, self.texts, strict=True))
            self.run.keep(**figure, equal_texts=f"{equal} of {len(texts)}")
            return figure
        return None

    def compare_with_target(self, figure: Figure, tree_name: str, settings: Settings) -> None:
        """Record the speedup beside 0.9 tau T(1) / T(n); if it is lower, profile a few steps and keep the trace."""
        if self.baseline is None:
            raise RuntimeError("there is no figure of compiled plain decoding to compare with")
        method = self.method_of(MAIN_KIND, tree_name, settings)
        tree, times = method.source.tree, (1, len(self.prompts[0]), self.run.scale.new_tokens)
        if self.forward_of_one is None:
            self.forward_of_one = forward_ms(self.model, Tree.chain(0), *times, self.run.alone)
        one, forward = self.forward_of_one, forward_ms(self.model, tree, *times, self.run.alone)
        target = target_of(figure["tau"], one, forward)
        found = {"compared": figure["method"], "tau": figure["tau"], "speedup": figure["speedup"]}
        found |= {"nodes": tree.num_nodes, "forward_ms": forward, "forward_of_1_ms": one, "target": target}
        found["steps_alone"] = figure["tau"] * self.baseline["step_ms"] / figure["step_ms"]  # speedup without prefills
        found["met"] = figure["speedup"] >= target
        self.run.keep(**found)
        if not found["met"]:
            trace = self.run.output / "traces" / f"{figure['method'].replace(', ', '-').replace(' ', '_')}.json.gz"
            with self.run.alone():
                seen = profile_steps(method, self.prompts[:1], self.run.on_gpu, trace)
            self.run.keep(missed=figure["method"], trace=str(trace.relative_to(self.run.output)), **seen)


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
