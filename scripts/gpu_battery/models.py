"""Stages of the second and third calls: train a backbone and heads on Python sources, and measure the heads."""

from __future__ import annotations

import itertools
import random
import statistics
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

import make_backbone
from decode.bench.methods import Method, medusa_method, plain_method, transformers_method
from decode.results import tau
from decode.settings import Settings
from medusa.config import KINDS
from medusa.files import write_json
from medusa.heads.independent import MedusaHeads
from medusa.loading import LoadOptions, load_backbone
from medusa.records.sources import DOCUMENT_SEPARATOR, read_records
from script_tools import write_jsonl
from scripts.gpu_battery.run import Figure, Run

Texts = list[list[int]]
FIRST_KIND = next(iter(KINDS))  # whose heads most stages use
SHORTEST = 500  # characters of a source that is used
PROMPT = 400  # characters of a source that a prompt is cut from


def backbone(run: Run) -> None:
    """Train a backbone on Python files of this machine, and write prompts from files that it did not train on."""
    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    files = sorted({path for folder in folders for path in folder.rglob("*.py") if path.is_file()})
    random.Random(0).shuffle(files)
    texts, taken, limit = [], 0, run.scale.source_bytes
    for path in files:
        if taken >= limit:
            break
        text = path.read_text(encoding="utf-8", errors="ignore").replace(DOCUMENT_SEPARATOR, "").strip()
        text = text[: min(20_000, limit // 100)]
        if len(text) > SHORTEST:
            texts.append(text)
            taken += len(text)
    if len(texts) < 40:
        raise RuntimeError(f"this machine has only {len(texts)} Python sources; training needs at least 40")
    held_out, seen = texts[::20], [text for index, text in enumerate(texts) if index % 20]
    for name, part in (("train", seen), ("eval", held_out[:20])):
        (run.output / f"{name}.txt").write_text(f"\n{DOCUMENT_SEPARATOR}\n".join(part) + "\n", encoding="utf-8")
    argv = ["--data", run.output / "train.txt", "--eval", run.output / "eval.txt", "--output", run.backbone]
    argv += ["--overwrite", "--data-licence", "various", "--device", run.device, *run.scale.backbone.split()]
    start = time.monotonic()
    make_backbone.main(list(map(str, argv)))
    size = (run.backbone / "model.safetensors").stat().st_size / 1e6
    run.keep(seconds=round(time.monotonic() - start), source_mb=sum(map(len, seen)) / 1e6, megabytes=size)
    tokenizer = AutoTokenizer.from_pretrained(run.backbone)
    openings = itertools.islice(itertools.cycle(seen), run.scale.texts)
    for path, texts in ((run.output / "openings.jsonl", openings), (run.prompts, held_out[: run.scale.prompts])):
        encoded = tokenizer([text[:PROMPT] for text in texts])["input_ids"]
        write_jsonl(path, "input_ids", (ids[: run.scale.prompt_tokens] for ids in encoded))


def heads(run: Run) -> None:
    """Let the backbone generate text, then train heads of each kind on that text."""
    own = run.output / "own.jsonl"
    argv = ["--backbone", run.backbone, "--prompts", run.output / "openings.jsonl", "--output", own, "--overwrite"]
    argv += ["--max-new-tokens", run.scale.new_tokens, "--batch-size", 128, "--temperature", 0.3, "--ignore-eos"]
    argv += ["--device", run.device, "--dtype", run.dtype_name, "--quiet"]
    start = time.monotonic()
    run.medusa("distill", *argv)
    run.keep(texts=run.scale.texts, writing_seconds=round(time.monotonic() - start))
    for number, kind in enumerate(KINDS):
        training = run.scale.other_heads if number else run.scale.first_heads
        config = {
            "backbone": str(run.backbone),
            "data": {"path": str(own), "sequence_length": 256},
            "output_dir": str(run.heads / kind),
            "heads": {"num": 4, "kind": kind},
            "device": run.device,
            "training": training | {"save_strategy": "no", "logging_steps": 50, "bf16": run.on_gpu},
        }
        recipe = run.output / f"{kind}.yaml"
        write_json(recipe, config)  # JSON is YAML
        with run.attempt(kind=kind):
            result = run.medusa("train", recipe, "--overwrite", "--quiet", result=f"train_{kind}")
            run.keep(kind=kind, steps=result.get("steps"), loss=result.get("loss"))


def benchmark(run: Run) -> None:
    """Measure tau and tokens per second of plain decoding, of decoding with medusa heads, and of `generate`."""
    bench = Bench(run)
    for how in ("compiled", "eager"):
        settings = replace(bench.eager, compile=how == "compiled")
        bench.measure(f"plain, {how}", plain_method(bench.model, settings))
        for name in run.scale.trees:
            bench.measure_heads(f"{FIRST_KIND}, {name}, {how}", FIRST_KIND, name, settings)
    static = {"cache_implementation": "static"}
    for name, options in {"compiled": static, "eager": {}, "static cache": static | {"disable_compile": True}}.items():
        bench.measure(f"generate, {name}", transformers_method(bench.model, bench.eager, **options))


def kinds(run: Run) -> None:
    """Measure tau and tokens per second of compiled decoding with heads of each kind."""
    bench = Bench(run)
    settings = replace(bench.eager, compile=True)
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
        self.eager = Settings(max_new_tokens=run.scale.new_tokens, ignore_eos=True)
        self.plain: tuple[float, Texts] | None = None  # tokens per second and texts; plain decoding is measured first

    def measure_heads(self, name: str, kind: str, tree: str, settings: Settings) -> None:
        """Measure the heads of this kind with the tree that the scale calls `tree`."""
        with self.run.attempt(method=name):
            heads = MedusaHeads.from_pretrained(self.run.heads / kind).to(self.run.device, self.model.dtype)
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
    for dtype in ("float32", "bfloat16"):
        tree, report = next(iter(run.scale.trees.values())), run.output / f"verify_{dtype}.html"
        argv = ["--backbone", run.backbone, "--heads", run.heads / FIRST_KIND, "--prompts", run.prompts]
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
    if run.errors:
        raise RuntimeError(run.errors[-1])
