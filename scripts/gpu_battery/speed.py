"""Stages of the third call: the trained heads, compared with plain decoding and `model.generate`."""

from __future__ import annotations

import statistics
import time

from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.results import tau
from decode.settings import Settings
from medusa.config import KINDS
from medusa.heads.independent import MedusaHeads
from medusa.loading import LoadOptions, load_backbone
from medusa.records.sources import read_records
from scripts.gpu_battery.run import Figure, Run

Texts = list[list[int]]
FIRST_KIND = next(iter(KINDS))  # whose heads most stages use


def benchmark(run: Run) -> None:
    """Measure tau and tokens per second of plain decoding, of decoding with medusa heads, and of `generate`."""
    bench = Bench(run)
    for how in ("compiled", "eager"):
        settings = bench.settings(how == "compiled")
        bench.measure(f"plain, {how}", plain_method(bench.model, settings))
        for name in run.scale.trees:
            bench.measure_heads(f"{FIRST_KIND}, {name}, {how}", FIRST_KIND, name, settings)
    eager = bench.settings(False)
    static = {"cache_implementation": "static"}
    for name, options in {"compiled": static, "eager": {}, "static cache": static | {"disable_compile": True}}.items():
        bench.measure(f"generate, {name}", transformers_method(bench.model, eager, **options))


def kinds(run: Run) -> None:
    """Measure tau and tokens per second of compiled decoding with heads of each kind."""
    bench = Bench(run)
    settings = bench.settings(True)
    bench.measure("plain, compiled", plain_method(bench.model, settings))
    for tree in run.scale.trees:
        for kind in KINDS:
            bench.measure_heads(f"{kind}, {tree}, compiled", kind, tree, settings)


class Bench:
    """Measures decoding methods, one after another, on the prompts that the stage `backbone` wrote."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model = load_backbone(str(run.backbone), LoadOptions(run.dtype_name, run.device)).model
        self.prompts: Texts = [record.input_ids for record in read_records(str(run.prompts))]
        self.plain: tuple[float, Texts] | None = None  # tokens per second and texts; plain decoding is measured first

    def settings(self, compile: bool) -> Settings:
        return Settings(max_new_tokens=self.run.scale.new_tokens, ignore_eos=True, compile=compile)

    def measure_heads(self, name: str, kind: str, tree: str, settings: Settings) -> None:
        """Measure the heads of this kind with the tree that the scale calls `tree`."""
        with self.run.attempt(method=name):
            heads = MedusaHeads.from_pretrained(self.run.heads(kind)).to(self.run.device, self.model.dtype)
            self.measure(name, medusa_method(self.model, heads, settings, tree=self.run.scale.trees[tree]))

    def measure(self, name: str, method: Method) -> None:
        """Decode one prompt as a warm-up, then all prompts in several rounds, and record the figures."""
        with self.run.attempt(method=name):
            start = time.monotonic()
            method(self.prompts[:1])
            figure: Figure = {"method": name, "first_seconds": round(time.monotonic() - start, 1)}
            rates = []
            for _ in range(self.run.scale.rounds):
                results = [result for prompt in self.prompts for result in method([prompt])]
                rates.append(sum(len(r.new_ids) for r in results) / sum(r.seconds for r in results))
            speed, texts = statistics.median(rates), [result.new_ids for result in results]
            self.plain = self.plain or (speed, texts)
            equal = sum(a == b for a, b in zip(texts, self.plain[1], strict=True))
            figure |= {"tokens_per_second": speed, "slowest": min(rates), "fastest": max(rates), "tau": tau(results)}
            if steps := sum(len(result.step_lengths) for result in results):
                figure["ms_per_step"] = 1000 * sum(result.seconds for result in results) / steps
            self.run.keep(**figure, speedup=speed / self.plain[0], equal_texts=f"{equal} of {len(texts)}")


def verify(run: Run) -> None:
    """Run `medusa verify` in float32 and bfloat16: equal greedy texts, and chi-square tests of sampled tokens."""
    passed = []
    for dtype in ("float32", "bfloat16"):
        tree, report = next(iter(run.scale.trees.values())), run.output / f"verify_{dtype}.html"
        argv = ["--backbone", run.backbone, "--heads", run.heads(FIRST_KIND), "--prompts", run.prompts]
        argv += ["--tree", tree, "--max-new-tokens", run.scale.new_tokens, "--draws", run.scale.draws]
        argv += ["--sampled-prompts", run.scale.sampled_prompts, "--dtype", dtype, "--device", run.device]
        argv += ["--report", report, "--overwrite", "--quiet"]
        with run.attempt(dtype=dtype):
            found = run.medusa("verify", *argv, result=f"verify_{dtype}")
            greedy, about = found["greedy"], {"dtype": dtype, "passed": found["passed"]}
            equal = f"{greedy['equal']} of {greedy['prompts']}"
            run.keep(**about, equal_texts=equal, rounding_ties=greedy["rounding_ties"])
            passed.append(found["passed"])
    if not all(passed):
        raise RuntimeError("there is evidence against equality; see the pages verify_*.html")
