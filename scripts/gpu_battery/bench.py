"""Stages that measure: the trained heads compared with plain decoding and `generate`, and `medusa verify`."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from decode.bench.benchmark import captures_graphs
from decode.bench.compare import Sample, interval
from decode.bench.figures import Interval, PromptFigures
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
from scripts.gpu_battery.steps import StepClock, forward_timer, profile_steps, target_of, warm_up

MAIN_KIND = "markov"  # whose heads most stages use
STATIC = {"cache_implementation": "static"}
BASELINE = "plain, compiled"


def benchmark(run: Run) -> None:
    """Measure tau and tokens per second of plain decoding, of decoding with heads, and of `generate`."""
    bench = Bench(run)
    for number, (how, way) in enumerate(run.ways.items()):
        bench.measure_way(how, way, [MAIN_KIND])
        if number == 0:
            bench.compare_with_targets()
    bench.measure_generate("compiled", "static cache", "eager")


def kinds(run: Run) -> None:
    """Measure tau and tokens per second of compiled decoding with heads of each kind."""
    bench = Bench(run)
    how, way = next(iter(run.ways.items()))
    bench.measure_way(how, way, list(KINDS))


def chat(run: Run) -> None:
    """Measure the heads of the chat model, the most important figures first: also samples, and times until a token.

    Planned for 30 layers, not measured: 55 s to compile the steps of a method, 40 s a forward alone, 5 s each when the
    code is on disk, and 10 s to time a group. So the groups below take 130, 90, 120, 65, 85, 165 and 65 s. A call that
    goes on leaves out the methods that have figures."""
    bench = Bench(run)
    (how, way), (first, *others) = next(iter(run.ways.items())), run.scale.trees
    sampled = f"{how}, temperature {run.scale.temperature}", way | {"temperature": run.scale.temperature}
    other_kinds = [kind for kind in run.scale.kinds if kind != MAIN_KIND]
    bench.measure_way(how, way, [MAIN_KIND], [first])
    bench.compare_with_targets([first])
    bench.measure_way(*sampled, [MAIN_KIND], [first])
    bench.measure_way(how, way, other_kinds, [first])
    bench.measure_generate("compiled", "eager", rounds=1)
    bench.measure_way(how, way, [MAIN_KIND], others)
    bench.compare_with_targets(others)
    bench.measure_way(*sampled, other_kinds, [first])


class Bench:
    """Measures decoding methods on the prompts of the backbone."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = load_backbone(str(run.backbone), LoadOptions(run.dtype_name, run.device)).model
        self.prompts = [record.input_ids for record in read_records(str(run.prompts))]
        self.eager = Settings(max_new_tokens=run.scale.new_tokens, ignore_eos=run.scale.ignore_eos)
        self.methods: dict[str, Method] = {}
        self.first_seconds: dict[str, float] = {}  # that the methods took to decode their first prompt
        self.figures: dict[str, Figure] = {one["method"]: one for one in run.kept if "tokens_per_second" in one}
        self.texts: list[list[int]] | None = None  # of compiled plain decoding
        self.heads: dict[str, MedusaHeads] = {}  # by their kind
        self.forwards: dict[str, Callable[[], float]] = {}  # timers of T(n), by the name of the tree; "" is T(1)

    def method_of(self, kind: str, tree: str, settings: Settings) -> Method:
        """Make a method that decodes with the heads of this kind, on the tree that the scale calls `tree`."""
        if kind not in self.heads:  # loaded once, because compiled steps belong to the heads that they were made for
            heads = MedusaHeads.from_pretrained(self.run.heads / kind)
            self.heads[kind] = heads.to(self.run.device, self.model.dtype)
        return medusa_method(self.model, self.heads[kind], settings, tree=self.run.scale.trees[tree])

    def measure_way(
        self, how: str, way: dict[str, object], kinds: Sequence[str], trees: Sequence[str] | None = None
    ) -> None:
        """Measure plain decoding and decoding with heads of these kinds on these trees, with the options `way`.

        Nothing is measured if a run that this one goes on with has all figures with heads."""
        settings, plain = replace(self.eager, **way), f"plain, {how}"
        makers: dict[str, Callable[[], Method]] = {plain: partial(plain_method, self.model, settings)}
        for tree, kind in itertools.product(self.run.scale.trees if trees is None else trees, kinds):
            if not self.run.has_kept(method=(name := f"{kind}, {tree}, {how}")):
                makers[name] = partial(self.method_of, kind, tree, settings)
        if len(makers) > 1:
            self.measure(makers, plain if "temperature" in way else BASELINE)

    def measure_generate(self, *hows: str, rounds: int | None = None) -> None:
        """Measure `generate` in these ways."""
        ways = {"compiled": STATIC, "static cache": STATIC | {"disable_compile": True}, "eager": {}}
        makers: dict[str, Callable[[], Method]] = {}
        for how in hows:
            if not self.run.has_kept(method=(name := f"generate, {how}")):
                makers[name] = partial(transformers_method, self.model, self.eager, **ways[how])
        if makers:
            self.measure(makers, rounds=rounds)

    def measure(
        self, makers: Mapping[str, Callable[[], Method]], baseline: str = BASELINE, rounds: int | None = None
    ) -> None:
        """Make methods and decode one prompt with each, which compiles what it needs; then time those that can."""
        first_seconds = {}
        for name, make in makers.items():
            with self.run.attempt(method=name):
                if name not in self.methods:
                    method, start = make(), time.monotonic()
                    method(self.prompts[:1])
                    self.first_seconds[name] = round(time.monotonic() - start, 1)
                    if captures_graphs(method):
                        warm_up(method, [[prompt] for prompt in self.prompts])
                    self.methods[name] = method
                first_seconds[name] = self.first_seconds[name]
        self.time(first_seconds, baseline, rounds or self.run.scale.rounds)

    def time(self, first_seconds: Mapping[str, float], baseline: str, rounds: int) -> None:
        """Decode all prompts with these methods in turn, in so many rounds; record a figure for each method.

        The first prompt has taken `first_seconds`. Tokens per second count the prefill; `step_ms` and `steps_alone`,
        the speedup of the steps, do not. Speedups are over the `baseline`. Samples have no equal texts."""
        clocks, peaks = {name: StepClock() for name in first_seconds}, dict[str, Figure]()
        rates: dict[str, list[float]] = {name: [] for name in first_seconds}
        results: dict[str, list[Result]] = {}
        for _, name in itertools.product(range(rounds), first_seconds):
            with self.run.attempt(method=name):
                method, clock = self.methods[name], clocks[name]
                self.run.forget_peak()
                results[name] = [result for prompt in self.prompts for result in method([prompt], clock.start())]
                seconds = sum(result.seconds for result in results[name])
                rates[name].append(sum(len(result.new_ids) for result in results[name]) / seconds)
                peaks[name] = self.run.peak()
        state = self.run.clocks()
        for name, found in results.items():
            with self.run.attempt(method=name):
                clock, was_kept = clocks[name], name in self.figures
                figure: Figure = {"method": name, "first_seconds": first_seconds[name]}
                figure["tokens_per_second"] = statistics.median(rates[name])
                figure |= {"rounds": rates[name], "tau": tau(found) or None, "step_ms": clock.ms}
                figure |= {"tau_interval": tau_interval(found), "first_token_ms": clock.first_ms, **peaks[name]}
                self.figures[name] = figure
                if baseline in self.figures:
                    base = self.figures[baseline]
                    figure["speedup"] = figure["tokens_per_second"] / base["tokens_per_second"]
                    if clock.ms and base["step_ms"]:
                        figure["steps_alone"] = figure["tau"] * base["step_ms"] / clock.ms
                texts = [result.new_ids for result in found]
                if name == BASELINE:
                    self.texts = self.texts or texts
                if baseline == BASELINE and self.texts:
                    equal = sum(a == b for a, b in zip(texts, self.texts, strict=True))
                    figure["equal_texts"] = f"{equal} of {len(texts)}"
                if not was_kept:  # a baseline is timed beside each group
                    self.run.keep(**figure, **state)

    def compare_with_targets(self, trees: Sequence[str] | None = None) -> None:
        """Record the speedup with each tree in the most important way beside its target (`target_of`)."""
        how, is_first = next(iter(self.run.ways)), not self.forwards
        names = {f"{MAIN_KIND}, {tree}, {how}": tree for tree in (self.run.scale.trees if trees is None else trees)}
        names = {name: tree for name, tree in names.items() if not self.run.has_kept(compared=name)}
        for tree in ["", *names.values()] if names else ():
            self.prepare_forward(tree)
        times = {name: timer() for name, timer in self.forwards.items()}
        for name, tree in names.items():
            with self.run.attempt(target=name):
                self.compare_with_target(name, self.tree(tree).num_nodes, times[""], times[tree])
        for name in [*names, *([BASELINE] if is_first and names else [])]:
            with self.run.attempt(traced=name):
                if name in self.methods:  # a run that this one goes on with may have measured it
                    self.trace(name)

    def prepare_forward(self, name: str) -> None:
        """Compile the forward alone over the nodes of the tree of this name, or over one node."""
        if name not in self.forwards:
            with self.run.attempt(forward=name or "1 node"):
                length, count = len(self.prompts[0]), self.run.scale.new_tokens
                self.forwards[name] = forward_timer(self.model, self.tree(name), 1, length, count)

    def tree(self, name: str) -> Tree:
        """The tree that the scale calls `name`, or without a name one node."""
        return load_tree(self.run.scale.trees[name], NUM_HEADS) if name else Tree.chain(0)

    def compare_with_target(self, name: str, nodes: int, one: float, forward: float) -> None:
        """Record a speedup and its target for T(1) and T(n) in milliseconds, n `nodes`."""
        figure = self.figures[name]
        found = {"compared": name, "nodes": nodes, "forward_ms": forward, "forward_of_1_ms": one}
        found |= {key: figure[key] for key in ("tau", "speedup", "steps_alone")}
        found["target"] = target_of(figure["tau"], one, forward)
        self.run.keep(**found, met=figure["speedup"] >= found["target"])

    def trace(self, name: str) -> None:
        """Keep a profile of steps, which shows where their time goes."""
        trace = self.run.output / "traces" / f"{self.run.stage}-{name}.json.gz".replace(", ", "-").replace(" ", "_")
        seen = profile_steps(self.methods[name], self.prompts[:1], self.run.on_gpu, trace)
        self.run.keep(traced=name, trace=str(trace.relative_to(self.run.output)), **seen)


def tau_interval(results: Sequence[Result]) -> Interval | None:
    """The 95 % interval of tau, from texts drawn with replacement; `None` without steps or for one text."""
    prompts = [
        PromptFigures(number, len(one.new_ids), len(one.uncut_lengths), sum(one.uncut_lengths), [one.seconds])
        for number, one in enumerate(results)
    ]
    sample = Sample.of(prompts)
    return interval(sample.tau(sample.resampling())) if len(results) > 1 and sample.steps.sum() else None


def verify(run: Run) -> None:
    """Run `medusa verify` in several dtypes: equal greedy texts, and chi-square tests of sampled tokens."""
    for dtype in run.scale.dtypes:
        if run.has_kept(dtype=dtype, passed=True):
            continue
        tree, report = next(iter(run.scale.trees.values())), run.output / f"{run.stage}_{dtype}.html"
        argv = ["--backbone", run.backbone, "--heads", run.heads / MAIN_KIND, "--prompts", run.prompts]
        argv += ["--tree", tree, "--max-new-tokens", run.scale.new_tokens, "--draws", run.scale.draws]
        argv += ["--sampled-prompts", run.scale.sampled_prompts, "--dtype", dtype, "--device", run.device]
        argv += ["--report", report, "--overwrite", "--quiet", *run.scale.verify]
        with run.attempt(dtype=dtype):
            found = run.medusa("verify", *argv, result=f"{run.stage}_{dtype}")
            greedy, about = found["greedy"], {"dtype": dtype, "passed": found["passed"]}
            equal = f"{greedy['equal']} of {greedy['prompts']}"
            run.keep(**about, equal_texts=equal, rounding_ties=greedy["rounding_ties"])
            if not found["passed"]:
                raise RuntimeError(f"there is evidence against equality; see {report}")
    run.require_no_errors()
