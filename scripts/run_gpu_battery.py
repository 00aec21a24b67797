"""Everything that wants a GPU, in one run without a network: speed, equality, heads, training, memory.

    python scripts/run_gpu_battery.py --output runs/battery                    # at most 9 minutes, on one GPU
    python scripts/run_gpu_battery.py --output runs/battery --quick            # tiny, a minute or two on a CPU
    python scripts/run_gpu_battery.py --output runs/battery --stage curves     # one stage again, the others are kept
    python scripts/run_gpu_battery.py --output runs/battery --page             # draw what is there

Every stage is a process of its own with a time limit: one that fails or hangs is reported and hides no other. A stage
writes its figures as they come, so that a limit keeps what was measured before it. The output is `battery.json`,
`battery.md` and, where matplotlib is installed, `battery.html`; logs and the heads lie in folders beside them. Nothing
but torch, transformers and what they need, and this package, is imported for the figures; the text that the backbone is
trained on is the Python sources of this machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SEPARATOR = "<|endoftext|>"
OPENING = 200  # characters of a file that are a prompt


def options(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@dataclass(frozen=True)
class Scale:
    """Sizes of everything."""

    big: dict[str, int]
    """A Llama of 7-8 B shape, with random weights: for the time of a forward over n tokens."""
    nodes: tuple[int, ...]
    compiled: tuple[int, ...]
    context: int
    repeats: int
    backbone: tuple[str, ...]
    """Options of make_backbone."""
    source_bytes: int
    texts: int
    """That the backbone writes for its heads."""
    new_tokens: int
    train: dict[str, Any]
    """Training of heads."""
    kinds: dict[str, Any]
    """Training of each kind of heads."""
    fewer_kinds: tuple[str, ...]
    """Those that are tried; all, if none are named."""
    prompts: int
    draws: int
    trees: tuple[str, ...]
    """Whose step is taken apart."""
    batches: tuple[int, ...]
    losses: tuple[str, ...]
    """Options of benchmark_loss."""


FULL = Scale(
    big={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    nodes=(1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    compiled=(1, 16, 64),
    context=512,
    repeats=30,
    backbone=options(
        "--hidden-size 1024 --layers 12 --heads 16 --kv-heads 8 --intermediate-size 2816 --vocab-size 16384 "
        "--context 2048 --row-length 512 --batch-size 48 --minutes 1.25"
    ),
    source_bytes=40_000_000,
    texts=2000,
    new_tokens=128,
    train={"max_minutes": 0.6, "per_device_train_batch_size": 16},
    kinds={"max_minutes": 0.25, "per_device_train_batch_size": 16},
    fewer_kinds=(),
    prompts=24,
    draws=200_000,
    trees=("chain", "topk:3,2,1", "mc_sim_7b_63"),
    batches=(1, 2, 4, 8, 16, 32, 64),
    losses=options("--positions 2048 8192 --hidden-size 4096 --vocab-size 128256 --objectives labels"),
)
QUICK = Scale(
    big={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
    nodes=(1, 4, 8),
    compiled=(4,),
    context=32,
    repeats=4,
    backbone=options(
        "--hidden-size 64 --layers 2 --heads 2 --kv-heads 1 --intermediate-size 128 --vocab-size 512 "
        "--context 256 --row-length 64 --batch-size 8 --steps 40 --threads 1"
    ),
    source_bytes=300_000,
    texts=24,
    new_tokens=24,
    train={"max_steps": 20, "per_device_train_batch_size": 4},
    kinds={"max_steps": 4, "per_device_train_batch_size": 4},
    fewer_kinds=("eagle",),
    prompts=3,
    draws=2000,
    trees=("topk:3,2,1",),
    batches=(1, 2),
    losses=options("--positions 64 --hidden-size 32 --vocab-size 1000 --lm-heads shared --objectives labels"),
)


@dataclass(frozen=True)
class Stage:
    """A process of its own. It runs in this order, while the whole run's minutes last."""

    run: Callable[[Run], None]
    seconds: int
    """At most."""
    needs: tuple[str, ...] = ()


class Run:
    """Where a stage works, how large, and what it has found so far."""

    def __init__(self, output: Path, name: str, scale: Scale, device: str, seconds: float) -> None:
        self.output, self.name, self.scale, self.device = output, name, scale, device
        self.until = time.monotonic() + seconds
        self.figures: dict[str, Any] = {}
        self.backbone, self.heads = output / "backbone", output / "heads"
        self.prompts = output / "prompts.jsonl"

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def seconds_left(self) -> float:
        return self.until - time.monotonic()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The one that heads are used in first."""
        return ("bfloat16", "float32") if self.on_gpu else ("float32", "bfloat16")

    def keep(self, **figures: Any) -> None:
        """Write what is known by now: a stage that is cut off keeps it."""
        from medusa.files import write_json

        self.figures |= figures
        write_json(figures_file(self.output, self.name), self.figures)

    def medusa(self, *words: Any, json_name: str | None = None) -> dict[str, Any]:
        """A `medusa` command in this process; what it wrote with --json, if a name is given for that."""
        from medusa.__main__ import main as medusa

        argv = [str(word) for word in words]
        place = self.output / "json" / f"{json_name}.json"
        if json_name:
            place.parent.mkdir(exist_ok=True)
            argv += ["--json", str(place)]
        print("$ medusa", *argv, flush=True)
        if status := medusa(argv):
            raise RuntimeError(f"medusa {argv[0]} ended with status {status}; its words are in the log")
        return json.loads(place.read_text(encoding="utf-8")) if json_name else {}

    def script(self, name: str, *words: Any) -> None:
        """A script beside this one, in a process of its own."""
        argv = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, words)]
        print("$", *argv, flush=True)
        subprocess.run(argv, check=True)

    def decoding(self, dtype: str | None = None, heads: Path | None = None) -> list[Any]:
        """Options that every decoding command takes."""
        words = ["--backbone", self.backbone, "--heads", heads or self.heads, "--prompts", self.prompts]
        words += ["--dtype", dtype or self.dtypes[0], "--device", self.device, "--quiet"]
        return words + ([] if self.on_gpu else ["--threads", 1])


def figures_file(output: Path, name: str) -> Path:
    return output / "stages" / f"{name}.json"


# -------------------------------------------------------------------------------------------------------------- stages


def curves(run: Run) -> None:
    """T(n): a forward over n tokens behind a context, as transformers runs it, as a CUDA graph, and compiled."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from decode.cache import TreeCache
    from decode.topology import Topology
    from decode.verify import TreeMasks
    from medusa import MedusaConfig, MedusaHeads, Tree
    from medusa.heads.inputs import HeadInputs

    dtype = torch.bfloat16 if run.on_gpu else torch.float32
    torch.set_default_dtype(dtype)
    with torch.device(run.device):
        config = LlamaConfig(**run.scale.big, max_position_embeddings=4096, tie_word_embeddings=False)
        model = LlamaForCausalLM(config).eval()
        heads = MedusaHeads(MedusaConfig(config.hidden_size, config.vocab_size, 4, block="mlp", lm_head="shared"))
    run.keep(parameters=model.num_parameters(), dtype=str(dtype), context=run.scale.context, points=[])
    context = torch.randint(config.vocab_size, (1, run.scale.context), device=run.device)

    def forward_over(nodes: int) -> tuple[Callable[[], Any], Callable[[Any], Callable[[], Any]]]:
        """A forward over `nodes` tokens, and the same by another callable in the model's place."""
        cache = TreeCache(config, 1, run.scale.context + nodes + 1)
        model(input_ids=context, past_key_values=cache, use_cache=True)
        cache.commit_prompt([run.scale.context])
        tree = Tree.chain(nodes - 1).to(run.device)
        masks = TreeMasks(config, dtype, torch.device(run.device))
        mask = masks([run.scale.context], Topology.of(tree))
        ids, positions = context[:, :nodes].contiguous(), (tree.depth + run.scale.context)[None]

        def by(called: Any) -> Callable[[], Any]:
            def forward() -> Any:
                out = called(
                    input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
                )
                cache.pending = 0
                return out.logits

            return forward

        return by(model), by

    @torch.inference_mode()
    def measured() -> None:
        hidden = torch.zeros(1, config.hidden_size, device=run.device, dtype=dtype)
        run.keep(heads_ms=milliseconds(lambda: heads(HeadInputs(hidden), model.lm_head), run))
        for nodes in run.scale.nodes:
            forward, _ = forward_over(nodes)
            point = {"nodes": nodes, "eager_ms": milliseconds(forward, run)}
            if run.on_gpu:
                point |= attempt("graph_ms", lambda forward=forward: milliseconds(graphed(forward), run))
            run.keep(points=[*run.figures["points"], point])
        run.keep(ratios=ratios(run.figures["points"]))
        compiled = []
        for nodes in run.scale.compiled:
            if compiled and run.seconds_left < 1.5 * compiled[-1].get("compiling_seconds", 0):
                compiled.append({"nodes": nodes, "error": "no time left to compile it"})
            else:
                compiled.append({"nodes": nodes} | attempt(None, lambda nodes=nodes: compile_and_time(nodes)))
            run.keep(compiled=compiled)

    def compile_and_time(nodes: int) -> dict[str, float]:
        torch._dynamo.reset()
        _, by = forward_over(nodes)
        # On a CPU only the tracing is tried: compiling takes a minute and says nothing about a GPU.
        called = torch.compile(model, dynamic=False, backend="inductor" if run.on_gpu else "eager")
        forward, start = by(called), time.perf_counter()
        forward()
        found = {"compiling_seconds": time.perf_counter() - start, "compiled_ms": milliseconds(forward, run)}
        if run.on_gpu:
            found |= attempt("compiled_graph_ms", lambda: milliseconds(graphed(forward), run))
        return found

    measured()
    run.keep(memory=device_memory(run))


def attempt(name: str | None, measure: Callable[[], Any]) -> dict[str, Any]:
    """`{name: figure}`, or what went wrong with it: one figure less is no reason to lose the others."""
    try:
        found = measure()
    except Exception as error:
        return {f"{name}_error" if name else "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {name: found} if name else found


def graphed(forward: Callable[[], Any]) -> Callable[[], Any]:
    """The same as a CUDA graph, which is launched once: no gap between kernels."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    return graph.replay


def milliseconds(work: Callable[[], Any], run: Run) -> float:
    """The median of several calls, each waited for."""
    import statistics

    import torch

    wait = torch.cuda.synchronize if run.on_gpu else lambda: None
    times = []
    for number in range(run.scale.repeats + 3):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if number >= 3:
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def ratios(points: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """T(n) / T(1), by the way it was run."""
    first = points[0]
    return {
        way: {str(point["nodes"]): point[f"{way}_ms"] / first[f"{way}_ms"] for point in points if f"{way}_ms" in point}
        for way in ("eager", "graph")
        if f"{way}_ms" in first
    }


def device_memory(run: Run) -> dict[str, int]:
    from medusa.memory import peak_memory

    return peak_memory()


def backbone(run: Run) -> None:
    """A backbone, trained on the spot on the Python sources of this machine (171 M parameters, --quick: tiny)."""
    documents = python_sources(run.scale.source_bytes)
    held_back = documents[::20]
    kept = [text for index, text in enumerate(documents) if index % 20]
    for name, texts in (("train", kept), ("eval", held_back[:20])):
        (run.output / f"{name}.txt").write_text(f"\n{SEPARATOR}\n".join(texts) + "\n", encoding="utf-8")
    openings = [text[:OPENING] for text in kept if len(text) > OPENING]
    write_prompts(run.output / "openings.jsonl", (openings * (1 + run.scale.texts // len(openings)))[: run.scale.texts])
    write_prompts(run.prompts, [text[:OPENING] for text in held_back if len(text) > OPENING][: run.scale.prompts])
    words = ["--data", run.output / "train.txt", "--eval", run.output / "eval.txt", "--output", run.backbone]
    words += ["--overwrite", "--data-licence", "various", "--device", run.device, *run.scale.backbone]
    start = time.monotonic()
    run.script("make_backbone", *words)
    config = json.loads((run.backbone / "config.json").read_text(encoding="utf-8"))
    run.keep(
        seconds=time.monotonic() - start,
        source_megabytes=sum(map(len, kept)) / 1e6,
        shape={name: config[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")},
        megabytes=(run.backbone / "model.safetensors").stat().st_size / 1e6,
    )


def python_sources(limit: int) -> list[str]:
    """Python files of this machine, in a fixed order that mixes packages, up to `limit` characters."""
    import random

    folders = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    files = sorted({path for folder in folders for path in folder.rglob("*.py") if path.is_file()})
    random.Random(0).shuffle(files)
    texts, taken = [], 0
    for path in files:
        if taken >= limit:
            break
        text = path.read_text(encoding="utf-8", errors="ignore").replace(SEPARATOR, "").strip()
        text = text[: min(20_000, limit // 100)]
        if len(text) > 500:
            texts.append(text)
            taken += len(text)
    if len(texts) < 40:
        raise RuntimeError(f"only {len(texts)} Python sources on this machine; that is no training text")
    return texts


def write_prompts(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")


def heads(run: Run) -> None:
    """Heads for that backbone, on text in its own words; then the tree that is fastest here."""
    own = run.output / "own.jsonl"
    machine = ["--device", run.device, "--quiet", "--dtype", run.dtypes[0]]
    words = ["--backbone", run.backbone, "--prompts", run.output / "openings.jsonl", "--output", own, "--overwrite"]
    words += ["--max-new-tokens", run.scale.new_tokens, "--batch-size", 128, "--ignore-eos"]
    start = time.monotonic()
    run.medusa("distill", *words, "--temperature", 0.3, *machine)
    run.keep(writing_seconds=time.monotonic() - start)
    run.keep(training=train(run, run.heads, {"num": 4}, run.scale.train))
    calibration = run.medusa("calibrate", *run.decoding(), json_name="calibration")
    run.keep(calibration=calibration, memory=device_memory(run))


def train(run: Run, folder: Path, heads: dict[str, Any], training: dict[str, Any]) -> dict[str, Any]:
    """`medusa train` on the text of `heads`."""
    content = {
        "backbone": str(run.backbone),
        "data": {"path": str(run.output / "own.jsonl"), "sequence_length": 256},
        "output_dir": str(folder),
        "heads": heads,
        "device": run.device,
        "training": training | {"save_strategy": "no", "logging_steps": 50, "bf16": run.on_gpu},
    }
    config = run.output / f"{folder.name}.yaml"
    config.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
    return run.medusa("train", config, "--overwrite", "--quiet", json_name=f"train_{folder.name}")


def benchmark(run: Run) -> None:
    """tau and speedup: the lossless rules and the lossy ones, against `model.generate`; compiled where that is had."""
    from medusa.__main__ import build_parser

    words = [*run.decoding(), "--tree", "auto", "--max-new-tokens", run.scale.new_tokens, "--ignore-eos"]
    more = ["--temperatures", "0,1", "--lossy", "--overwrite", "--report", run.output / "benchmark.html"]
    run.keep(eager=slim(run.medusa("benchmark", *words, "--rounds", 3, *more, json_name="benchmark")))
    if "--compile" in build_parser("benchmark").format_help():
        run.keep(compiled=slim(run.medusa("benchmark", *words, "--rounds", 3, "--compile", json_name="compiled")))


def slim(outcome: dict[str, Any]) -> dict[str, Any]:
    """Without the figures of each prompt, which stay in the run's own JSON."""
    kept = {
        name: {key: value for key, value in figures.items() if key not in ("prompts", "calibration")}
        for name, figures in outcome["methods"].items()
    }
    return outcome | {"methods": kept}


def verify(run: Run) -> None:
    """Equality in both dtypes: greedy texts, and samples against the target."""
    for dtype in run.dtypes:
        words = [*run.decoding(dtype), "--draws", run.scale.draws, "--sampled-prompts", 2, "--overwrite"]
        words += ["--max-new-tokens", run.scale.new_tokens, "--report", run.output / f"verify_{dtype}.html"]
        found = attempt(
            None, lambda words=words, dtype=dtype: run.medusa("verify", *words, json_name=f"verify_{dtype}")
        )
        if "error" in found and (run.output / "json" / f"verify_{dtype}.json").is_file():  # evidence against equality
            found |= json.loads((run.output / "json" / f"verify_{dtype}.json").read_text(encoding="utf-8"))
        run.keep(**{dtype: {name: found[name] for name in ("passed", "greedy", "error") if name in found}})
    if failed := [dtype for dtype in run.dtypes if not run.figures[dtype].get("passed")]:
        raise RuntimeError(f"not passed in {', '.join(failed)}")


def step(run: Run) -> None:
    """A step against what it cannot do without: a bare forward and the heads at one position."""
    for tree in run.scale.trees:
        place = run.output / "json" / f"step_{tree.replace(':', '_').replace(',', '_')}.json"
        place.parent.mkdir(exist_ok=True)
        words = [*run.decoding(), "--max-prompts", 2, "--max-new-tokens", run.scale.new_tokens, "--json", place]

        def measure(words: list[Any] = words, place: Path = place, tree: str = tree) -> Any:
            run.script("measure_step", *words, "--tree", tree)
            return json.loads(place.read_text(encoding="utf-8"))

        run.keep(**{tree: attempt(None, measure)})
    require_one(run.figures)


def require_one(figures: dict[str, Any]) -> None:
    """A stage that lost every one of its figures has failed."""
    if all("error" in found for found in figures.values()):
        raise RuntimeError(next(iter(figures.values()))["error"])


def losses(run: Run) -> None:
    """ContextKV and time of the loss: all logits at once, in chunks, and Liger's kernels where they are installed."""
    place = run.output / "json" / "losses.json"
    place.parent.mkdir(exist_ok=True)
    run.script("benchmark_loss", *run.scale.losses, "--device", run.device, "--output", place)
    run.keep(**json.loads(place.read_text(encoding="utf-8")))


def kinds(run: Run) -> None:
    """Kinds of heads after the same short training, with the same tree: tau and speedup."""
    from medusa.config import KINDS

    for kind, block in [("medusa", "square"), *((kind, "mlp") for kind in run.scale.fewer_kinds or KINDS)]:

        def measure(kind: str = kind, block: str = block) -> dict[str, Any]:
            folder = run.output / f"heads_{kind}_{block}"
            trained = train(run, folder, {"num": 4, "kind": kind, "block": block}, run.scale.kinds)
            words = [*run.decoding(heads=folder), "--tree", run.scale.trees[-1], "--rounds", 1, "--ignore-eos"]
            words += ["--max-new-tokens", run.scale.new_tokens]
            outcome = run.medusa("benchmark", *words, json_name=f"kind_{kind}_{block}")
            medusa = outcome["methods"]["medusa"]
            kept = ("tau", "tau_interval", "speedup", "speedup_vs_generate", "speedup_vs_generate_interval")
            nodes = outcome["settings"]["nodes"]
            return {name: medusa[name] for name in kept} | {"nodes": nodes, "steps_trained": trained.get("steps")}

        run.keep(**{f"{kind}, {block}": attempt(None, measure)})
    require_one(run.figures)


def batches(run: Run) -> None:
    """Tokens per second with the tree that is fastest at each batch size, and without heads."""
    prompts = [json.loads(line)["prompt"] for line in run.prompts.read_text(encoding="utf-8").splitlines()]
    for size in run.scale.batches:

        def measure(size: int = size) -> dict[str, Any]:
            place = run.output / "batch.jsonl"  # one full batch, whatever its size
            write_prompts(place, (prompts * (1 + size // len(prompts)))[: max(size, 1)])
            words = [*run.decoding(), "--prompts", place, "--tree", "auto", "--batch-size", size, "--rounds", 3]
            words += ["--max-new-tokens", run.scale.new_tokens, "--ignore-eos"]
            outcome = run.medusa("benchmark", *words, json_name=f"batch_{size}")
            methods = outcome["methods"]
            return {
                "nodes": outcome["settings"]["nodes"],
                "tokens_per_second": {name: methods[name]["tokens_per_second"]["median"] for name in methods},
                "tau": methods["medusa"]["tau"],
                "speedup": methods["medusa"]["speedup"],
                "speedup_interval": methods["medusa"]["speedup_interval"],
            }

        run.keep(**{str(size): attempt(None, measure)})
    require_one(run.figures)


def fsdp(run: Run) -> None:
    """The backbone sharded by FSDP2 over the one process there is: the same hidden states, and its peak memory."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from medusa.backbone import Backbone
    from medusa.loading import LoadOptions, load_backbone
    from train.sharding import blocks

    model = load_backbone(str(run.backbone), LoadOptions(run.dtypes[0], run.device)).model
    ids = torch.randint(Backbone(model).vocab_size, (2, 64), device=run.device)
    with torch.no_grad():
        expected = Backbone(model).hidden_states(ids, use_cache=False)
    kind = "cuda" if run.on_gpu else "cpu"
    if run.on_gpu:
        torch.cuda.set_device(run.device)
    dist.init_process_group("nccl" if run.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(kind, (1,))
        sharded = blocks(model)
        for block in sharded:
            fully_shard(block, mesh=mesh)
        with torch.no_grad():
            found = Backbone(model).hidden_states(ids, use_cache=False)
    finally:
        dist.destroy_process_group()
    difference = float((found - expected).abs().max())
    run.keep(blocks=len(sharded), largest_difference=difference, memory=device_memory(run))
    if difference > 0:
        raise RuntimeError(f"sharded hidden states differ by {difference:g}")


STAGES: dict[str, Stage] = {
    "curves": Stage(curves, 130),
    "backbone": Stage(backbone, 130),
    "heads": Stage(heads, 90, ("backbone",)),
    "benchmark": Stage(benchmark, 75, ("heads",)),
    "verify": Stage(verify, 60, ("heads",)),
    "step": Stage(step, 45, ("heads",)),
    "losses": Stage(losses, 60),
    "batches": Stage(batches, 75, ("heads",)),
    "kinds": Stage(kinds, 150, ("heads",)),
    "fsdp": Stage(fsdp, 30, ("backbone",)),
}
SLOW_MACHINE = 4  # times the limits with --quick: a CPU that others use too


# ------------------------------------------------------------------------------------------------------- orchestration


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a folder; what a stage left is replaced")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    parser.add_argument("--stage", nargs="+", choices=STAGES, help="these only (default: all)")
    parser.add_argument("--minutes", type=float, default=9, help="for everything (default: %(default)s)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--page", action="store_true", help="measure nothing: write battery.md and battery.html again")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one stage, in this process
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # this checkout's packages, also where nothing is installed

    import torch

    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cpu" and not (args.quick or args.page):
        parser.error("PyTorch sees no GPU here; --quick tries everything in tiny sizes on a CPU")
    scale = QUICK if args.quick else FULL
    if args.only:
        if args.device == "cpu":
            torch.set_num_threads(1)
        STAGES[args.only].run(Run(args.output, args.only, scale, args.device, args.seconds))
        return 0
    for folder in ("stages", "logs"):
        (args.output / folder).mkdir(parents=True, exist_ok=True)
    outcome = read(args.output)
    if not args.page:
        outcome = run_stages(args, outcome)
    write(args.output, outcome)
    failed = [name for name, stage in outcome["stages"].items() if stage["status"] != "done"]
    print(f"{args.output / 'battery.json'}: {len(outcome['stages']) - len(failed)} stages done", flush=True)
    return 1 if failed else 0


def read(output: Path) -> dict[str, Any]:
    """What earlier calls left, so that one stage can be run again."""
    place = output / "battery.json"
    return json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {"stages": {}}


def run_stages(args: argparse.Namespace, outcome: dict[str, Any]) -> dict[str, Any]:
    from decode.bench.machine import commit, machine
    from medusa.files import write_json

    outcome |= {
        "machine": vars(machine()) | {"device": args.device},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "quick": args.quick,
    }
    end = time.monotonic() + 60 * args.minutes
    for name in args.stage or STAGES:
        seconds = min(STAGES[name].seconds * (SLOW_MACHINE if args.quick else 1), end - time.monotonic())
        print(f"{name} ...", end=" ", flush=True)
        found = run_stage(args, name, outcome["stages"], seconds)
        print(found["status"], f"{found['seconds']:.0f} s", found.get("error", ""), flush=True)
        outcome["stages"][name] = found
        outcome["stages"] = {name: outcome["stages"][name] for name in STAGES if name in outcome["stages"]}
        write_json(args.output / "battery.json", outcome)
    return outcome


def run_stage(args: argparse.Namespace, name: str, before: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One stage in a process of its own, ended with all its children at its limit."""
    about = STAGES[name].run.__doc__ or ""
    lacking = [needed for needed in STAGES[name].needs if before.get(needed, {}).get("status") != "done"]
    if lacking:
        return {"status": "skipped", "about": about, "error": f"needs {lacking[0]}", "seconds": 0.0}
    if seconds < 10:
        return {"status": "skipped", "about": about, "error": "no time left; --stage runs it alone", "seconds": 0.0}
    figures_file(args.output, name).unlink(missing_ok=True)
    words = [sys.executable, __file__, "--output", args.output, "--only", name, "--device", args.device]
    words += ["--seconds", seconds, *(["--quick"] if args.quick else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment["XDG_CACHE_HOME"] = str(args.output.absolute() / "cache")  # calibrations of this run only
    start, log = time.monotonic(), args.output / "logs" / f"{name}.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [str(word) for word in words],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status = "done" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "cut off"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: dict[str, Any] = {"status": status, "about": about, "seconds": round(time.monotonic() - start, 1)}
    if figures_file(args.output, name).is_file():
        found["figures"] = json.loads(figures_file(args.output, name).read_text(encoding="utf-8"))
    if status == "failed":
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        found["error"] = lines[-1].strip() if lines else f"status {process.returncode}"
    elif status == "cut off":
        found["error"] = f"not done after {seconds:.0f} s"
    return found


# ----------------------------------------------------------------------------------------------------------- the report


def write(output: Path, outcome: dict[str, Any]) -> None:
    """`battery.json`, its tables, and a page of plots where matplotlib is installed."""
    import importlib.util

    from medusa.files import write_json, write_text

    write_json(output / "battery.json", outcome)
    write_text(output / "battery.md", markdown(outcome))
    if importlib.util.find_spec("matplotlib") is None:
        print("no battery.html: it needs matplotlib; --page draws it where that is installed", flush=True)
        return
    page(outcome).save(output / "battery.html")


Table = tuple[str, list[str], list[list[str]]]


def tables(outcome: dict[str, Any]) -> list[Table]:
    """(title, head, rows) of everything that was measured."""
    stages = outcome["stages"]
    rows = [[n, s["status"], f"{s['seconds']:.0f}", s.get("error", ""), s["about"]] for n, s in stages.items()]
    found: list[Table] = [("Stages", ["stage", "status", "seconds", "error", "what"], rows)]
    figures = {name: stage["figures"] for name, stage in stages.items() if stage.get("figures")}
    for name, make in TABLES.items():
        if name in figures:
            found += make(figures[name])
    return found


def curve_tables(figures: dict[str, Any]) -> list[Table]:
    first = figures["points"][0] if figures["points"] else {}
    rows = [
        [str(p["nodes"]), *(f"{p[w]:.3f}" if w in p else p.get(f"{w}_error", "") for w in ("eager_ms", "graph_ms"))]
        + [f"{p[w] / first[w]:.2f}" if w in p and w in first else "" for w in ("eager_ms", "graph_ms")]
        for p in figures["points"]
    ]
    head = ["n", "eager ms", "CUDA graph ms", "T(n)/T(1) eager", "T(n)/T(1) graph"]
    ways = ("compiled_ms", "compiled_graph_ms", "compiling_seconds")
    compiled = [
        [str(p["nodes"]), *(f"{p[way]:.3f}" if way in p else p.get("error", "") for way in ways)]
        for p in figures.get("compiled", [])
    ]
    title = f"T(n): {figures['parameters'] / 1e9:.2g} B parameters, {figures['dtype']}, context {figures['context']}"
    return [(title, head, rows), ("T(n) compiled", ["n", "ms", "as CUDA graph ms", "s to compile"], compiled)]


def benchmark_tables(figures: dict[str, Any]) -> list[Table]:
    from decode.bench.figures import BenchmarkResult
    from decode.bench.report.benchmark_page import speed_row

    found: list[Table] = []
    for way, outcome in figures.items():
        head = ["method", "tokens/s", "slowest", "fastest", "tau", "x plain", "95 %", "x generate", "95 %", "same text"]
        rows = [
            speed_row(name, method, True) for name, method in BenchmarkResult.from_json(outcome, way).methods.items()
        ]
        title = f"Speed, {way}, {outcome['settings']['nodes']} nodes, {outcome['machine']['dtype']}"
        found.append((title, head, rows))
        if rows := [
            [row["acceptance"], *(f"{row[name]:.3f}" for name in ("tau", "speedup_vs_generate", "log_likelihood"))]
            for row in outcome.get("lossy", [])
        ]:
            found.append((f"Rules, {way}, temperature 1", ["rule", "tau", "x generate", "log-likelihood"], rows))
    return found


def verify_tables(figures: dict[str, Any]) -> list[Table]:
    rows = []
    for dtype, found in figures.items():
        greedy = found.get("greedy", {})
        cells = [f"{greedy['equal']} of {greedy['prompts']}", str(greedy["rounding_ties"])] if greedy else ["", ""]
        rows.append([dtype, str(found.get("passed")), *cells, found.get("error", "")])
    return [("Equality", ["dtype", "passed", "greedy texts equal", "rounding ties", "error"], rows)]


def flat_table(title: str, names: tuple[str, ...]) -> Callable[[dict[str, Any]], list[Table]]:
    """One row for each entry, with its figures of these names."""

    def make(figures: dict[str, Any]) -> list[Table]:
        rows = [
            [name, *(in_words(found.get(key)) for key in names), found.get("error", "")]
            for name, found in figures.items()
        ]
        return [(title, ["", *(name.replace("_", " ") for name in names), "error"], rows)]

    return make


def in_words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list):
        return " to ".join(map(in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(inner)}" for name, inner in value.items())
    return "" if value is None else str(value)


def loss_tables(figures: dict[str, Any]) -> list[Table]:
    head = list(figures["rows"][0])
    return [
        ("Losses", [name.replace("_", " ") for name in head], [[in_words(r[n]) for n in head] for r in figures["rows"]])
    ]


def only_row(title: str) -> Callable[[dict[str, Any]], list[Table]]:
    def make(figures: dict[str, Any]) -> list[Table]:
        kept = {name: value for name, value in figures.items() if not isinstance(value, dict) or name != "calibration"}
        return [(title, ["", ""], [[name.replace("_", " "), in_words(value)] for name, value in kept.items()])]

    return make


TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "curves": curve_tables,
    "backbone": only_row("Backbone"),
    "heads": only_row("Heads"),
    "benchmark": benchmark_tables,
    "verify": verify_tables,
    "step": flat_table("Step", ("step_ms", "forward_ms", "heads_ms", "ratio")),
    "losses": loss_tables,
    "kinds": flat_table(
        "Kinds of heads",
        ("nodes", "tau", "speedup", "speedup_vs_generate", "speedup_vs_generate_interval", "steps_trained"),
    ),
    "batches": flat_table("Batches", ("nodes", "tokens_per_second", "tau", "speedup", "speedup_interval")),
    "fsdp": only_row("FSDP on one device"),
}


def headline(outcome: dict[str, Any]) -> str:
    machine = outcome["machine"]
    size = "tiny sizes: these figures say that it runs, and nothing about speed. " if outcome["quick"] else ""
    return (
        f"{size}{machine['gpu'] or machine['processor']}, torch {machine['torch']}, transformers "
        f"{machine['transformers']}, Python {machine['python']}; {outcome['date']}, commit {outcome['commit']}"
    )


def markdown(outcome: dict[str, Any]) -> str:
    parts = ["# GPU battery", headline(outcome)]
    for title, head, rows in tables(outcome):
        lines = [f"| {' | '.join(cells)} |" for cells in ([n or " " for n in head], *rows)]
        parts.append(f"## {title}\n\n" + "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]))
    return "\n\n".join(parts) + "\n"


def page(outcome: dict[str, Any]) -> Any:
    """The page of plots, the tables below them."""
    from decode.bench.calibrate import Calibration
    from decode.bench.figures import BenchmarkResult
    from decode.bench.report import plots as pictures
    from decode.bench.report.page import ReportPage

    made = ReportPage("sections.html.j2", "GPU battery")
    figures = {name: stage.get("figures", {}) for name, stage in outcome["stages"].items()}
    drawn = []
    if points := figures.get("curves", {}).get("points"):
        caption = "A forward over n tokens behind the context; above n = 1, what a tree costs."
        drawn.append((pictures.alone(forward_times, points, figures["curves"].get("compiled", [])), caption))
    if eager := figures.get("benchmark", {}).get("eager"):
        result = BenchmarkResult.from_json(eager, "eager")
        height = pictures.height_of(len(result.methods))
        caption = "95 % of resamplings lie within the lines."
        drawn.append((pictures.alone(pictures.speedups, result.methods, height=height), caption))
        drawn.append((pictures.alone(pictures.depths, result.medusa), "How deep guesses are accepted."))
        timed = {name: of.step_ms for name, of in result.methods.items() if of.step_ms}
        drawn.append((pictures.alone(pictures.stages, timed, height=3), "Where a step's time goes."))
    if sizes := {n: f for n, f in figures.get("batches", {}).items() if "error" not in f}:
        drawn.append((pictures.alone(batch_rates, sizes), "Tokens per second, all rows together."))
    if calibration := figures.get("heads", {}).get("calibration"):
        found = Calibration.from_dict(calibration)
        drawn.append((pictures.alone(pictures.by_nodes, found, "tokens_per_second"), "Speed by size of the tree."))
    made.content = {
        "introduction": headline(outcome),
        "pictures": [made.picture(*pair) for pair in drawn],
        "sections": [
            (title, head, rows, "words" if title in ("Stages", "Backbone", "Heads", "FSDP on one device") else "")
            for title, head, rows in tables(outcome)
        ],
    }
    return made


def forward_times(axes: Any, points: list[dict[str, Any]], compiled: list[dict[str, Any]]) -> None:
    from decode.bench.report.colors import INK
    from decode.bench.report.plots import plain_frame

    ways = [("eager_ms", "eager", "transformers", points), ("graph_ms", "CUDA graph", "medusa", points)]
    ways += [
        ("compiled_graph_ms", "compiled, CUDA graph", "violet", compiled),
        ("compiled_ms", "compiled", "amber", compiled),
    ]
    for key, label, ink, source in ways:
        if found := [(point["nodes"], point[key]) for point in source if key in point]:
            axes.plot(*zip(*found, strict=True), marker="o", ms=4, color=INK[ink], label=label)
    axes.set(title="milliseconds of a forward over n tokens", xlabel="n")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    plain_frame(axes)


def batch_rates(axes: Any, sizes: dict[str, Any]) -> None:
    from decode.bench.report.colors import INK
    from decode.bench.report.plots import plain_frame

    for name in ("plain", "transformers", "medusa"):
        values = [found["tokens_per_second"][name] for found in sizes.values()]
        axes.plot(list(map(int, sizes)), values, marker="o", ms=4, color=INK[name], label=name)
    axes.set(title="tokens per second", xlabel="batch size", xscale="log")
    axes.set_xticks(list(map(int, sizes)), list(sizes))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    plain_frame(axes)


if __name__ == "__main__":
    sys.exit(main())
