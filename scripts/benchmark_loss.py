"""Measure peak memory and time of the loss: with all logits at once (plain), and in chunks.

    python scripts/benchmark_loss.py --output runs/loss_memory.json
    python scripts/benchmark_loss.py --device cuda --hidden-size 4096 --positions 2048 8192

Each variant runs in a separate process with one thread. Memory is the peak of one loss and its backward pass, with the
gradients of the heads, above the memory in use before: resident memory on a CPU (Linux), tensors on a GPU. Time is the
shortest of three passes: CPU time in float32 on a CPU, wall time in bfloat16 on a GPU. The heads have one square block,
so the loss dominates both. On a GPU, Liger's kernels are measured too if they are installed.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import torch

from decode.bench.machine import stopwatch
from measuring import peak_meter
from medusa.config import MedusaConfig
from medusa.files import write_json
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.loading import LoadOptions
from script_tools import markdown_table, run_script, script_parser
from train.loss.heads import head_losses
from train.loss.teacher import BackboneTeacher
from train.loss.weighting import Weighting

PASSES = 3
COMMON = ("heads", "hidden_size", "vocab_size", "device")  # fields that all variants of a run share


@dataclass(frozen=True)
class Variant:
    """A loss to measure: its backend and objective, the number of positions, and the sizes of the heads."""

    backend: str
    lm_head: str
    objective: str
    positions: int
    heads: int = 4
    hidden_size: int = 256
    vocab_size: int = 128_000
    device: str = "cpu"


def measure(variant: Variant) -> dict[str, float]:
    """Measure the peak memory in MB and the seconds of one loss and its backward pass."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, positions = variant.device, variant.positions
    hidden_size, vocab_size = variant.hidden_size, variant.vocab_size
    options = {"device": device, "dtype": torch.float32 if device == "cpu" else torch.bfloat16}
    config = MedusaConfig(hidden_size, vocab_size, variant.heads, block="square", lm_head=variant.lm_head)
    with torch.device(device):  # where large heads take no time to make
        heads = MedusaHeads(config).to(**options)
    lm_head = torch.nn.Linear(hidden_size, vocab_size, bias=False, **options).requires_grad_(False)
    heads.start_from(lm_head.weight)
    hidden = torch.randn(positions + variant.heads, hidden_size, **options)
    labels = torch.randint(vocab_size, (variant.heads, positions), device=device)
    teacher = BackboneTeacher(hidden, torch.arange(positions, device=device), lm_head)
    arguments = (HeadInputs(hidden[:positions]), labels, lm_head, Weighting())
    arguments += (teacher if variant.objective == "distill" else None, variant.backend)
    clock = stopwatch(torch.device(device))
    peak, seconds = 0, []
    for _ in range(PASSES):
        heads.zero_grad(set_to_none=True)
        grown, start = peak_meter(device), clock()
        head_losses(heads, *arguments).objective.backward()
        seconds.append(clock() - start)
        peak = max(peak, grown())
    return {"peak_mb": round(peak / 1e6, 1), "seconds": round(min(seconds), 4)}


def compared(row: dict[str, object], rows: Sequence[dict[str, object]]) -> list[object]:
    """Return the cells of a row, with its memory and time relative to the plain backend on the same positions."""
    plain = next(other for other in rows if all(other[key] == row[key] for key in ("lm_head", "objective")))
    memory = time = ""
    if row["positions"] == plain["positions"]:
        memory, time = f"1/{plain['peak_mb'] / row['peak_mb']:.1f}", f"{row['seconds'] / plain['seconds']:.2f}"
    about = [row[key] for key in ("lm_head", "objective", "positions", "backend")]
    return [*about, round(row["peak_mb"]), memory, f"{row['seconds']:.1f}", time]


def main(argv: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--positions", type=int, nargs="+", default=[512, 2048], help="plain uses only the first")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--lm-heads", nargs="+", choices=("shared", "own"), default=["shared", "own"])
    parser.add_argument("--objectives", nargs="+", choices=("labels", "distill"), default=["labels", "distill"])
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures (JSON)")
    args = parser.parse_args(argv)
    LoadOptions(device=args.device)  # raises RequestError for a device that this machine lacks
    common = {name: getattr(args, name) for name in COMMON}
    with_liger = args.device != "cpu" and find_spec("liger_kernel") is not None
    chosen = itertools.product(args.lm_heads, args.objectives, ("plain", "chunked", "liger"), args.positions)
    variants = [
        Variant(backend, lm_head, objective, positions, **common)
        for lm_head, objective, backend, positions in chosen
        if backend != "plain" or positions == args.positions[0]
        if backend != "liger" or (with_liger and objective == "labels")
    ]
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        figures = list(alone.map(measure, variants))
    rows = [asdict(variant) | found for variant, found in zip(variants, figures, strict=True)]
    head = ["LM head", "objective", "positions", "version", "peak MB", "of plain", "s", "of plain"]
    print(markdown_table(head, [compared(row, rows) for row in rows]))
    if args.output:
        about = common | {"threads": 1, "dtype": "float32" if args.device == "cpu" else "bfloat16"}
        about["machine"] = platform.processor() or platform.machine()
        rows = [{name: value for name, value in row.items() if name not in COMMON} for row in rows]
        write_json(args.output, {"settings": about, "rows": rows})


if __name__ == "__main__":
    run_script(main)
