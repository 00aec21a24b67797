"""Peak memory and CPU time of the loss: all logits at once, and in chunks.

    python scripts/benchmark_loss.py --output docs/results/loss_memory.json
    python scripts/benchmark_loss.py --device cuda --hidden-size 4096 --positions 2048 8192

Every variant is a process of its own, with one thread. Memory is the most that a loss and its backward held beyond what
was there before it (on a CPU the kernel's high-water mark of resident memory, on a GPU what tensors took), gradients of
the heads included; time is the least of three passes', CPU time on a CPU and wall time, in bfloat16, on a GPU. Heads
have one square block, so that nearly all of both is the loss. Liger's kernels take part on a GPU where they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PASSES = 3


@dataclass(frozen=True)
class Variant:
    backend: str
    lm_head: str
    objective: str
    positions: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--positions", type=int, nargs="+", default=[512, 2048], help="the plain version: the first only"
    )
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=128_000)
    parser.add_argument("--lm-heads", nargs="+", choices=("shared", "own"), default=["shared", "own"])
    parser.add_argument("--objectives", nargs="+", choices=("labels", "distill"), default=["labels", "distill"])
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="where the figures go (JSON)")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # one variant, in this process
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(Variant(**json.loads(args.only)), args)))
        return
    variants = [
        Variant(backend, lm_head, objective, positions)
        for lm_head in args.lm_heads
        for objective in args.objectives
        for backend in ("plain", "chunked", "liger")
        for positions in args.positions
        if backend != "plain" or positions == args.positions[0]
        if backend != "liger" or (args.device != "cpu" and objective == "labels" and find_spec("liger_kernel"))
    ]
    rows = []
    print("| LM head | objective | positions | version | peak MB | of plain | s | of plain |")
    print("|---" * 8 + "|")
    for variant in variants:
        rows.append(row := alone(variant))
        plain = next(r for r in rows if (r["lm_head"], r["objective"]) == (row["lm_head"], row["objective"]))
        share = "", ""
        if row["positions"] == plain["positions"]:
            share = f"1/{plain['peak_mb'] / row['peak_mb']:.1f}", f"{row['seconds'] / plain['seconds']:.2f}"
        cells = row["lm_head"], row["objective"], row["positions"], row["backend"], round(row["peak_mb"]), share[0]
        print("|", " | ".join(map(str, (*cells, f"{row['seconds']:.1f}", share[1]))), "|", flush=True)
    if args.output:
        sizes = {name: getattr(args, name) for name in ("heads", "hidden_size", "vocab_size")}
        about = {**sizes, "device": args.device, "dtype": "float32" if args.device == "cpu" else "bfloat16"}
        about |= {"threads": 1, "machine": platform.processor() or platform.machine()}
        args.output.write_text(json.dumps({"settings": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def alone(variant: Variant) -> dict[str, Any]:
    """The figures of one variant, from a process that does nothing else."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, *sys.argv, "--only", json.dumps(vars(variant))]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, **threads})
    return json.loads(out.stdout)


def measure(variant: Variant, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from medusa.config import MedusaConfig
    from medusa.heads.independent import MedusaHeads
    from train.loss import Teacher, Weighting, head_losses

    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_heads, positions, hidden_size, vocab_size = args.heads, variant.positions, args.hidden_size, args.vocab_size
    config = MedusaConfig(hidden_size, vocab_size, num_heads, block="square", lm_head=variant.lm_head)
    on_cpu = args.device == "cpu"
    torch.set_default_device(args.device)
    torch.set_default_dtype(torch.float32 if on_cpu else torch.bfloat16)
    heads = MedusaHeads(config)
    lm_head = torch.nn.Linear(hidden_size, vocab_size, bias=False).requires_grad_(False)
    heads.start_from(lm_head.weight)
    hidden = torch.randn(positions + num_heads, hidden_size)
    labels = torch.randint(0, vocab_size, (num_heads, positions))
    teacher = Teacher(hidden, torch.arange(positions), lm_head) if variant.objective == "distill" else None
    clock = time.process_time if on_cpu else waiting_clock
    peak, seconds = 0.0, []
    for _ in range(PASSES):
        heads.zero_grad(set_to_none=True)
        before = reset_peak(on_cpu)
        start = clock()
        figures = head_losses(heads, hidden[:positions], labels, lm_head, Weighting(), teacher, variant.backend)
        figures.objective.sum().backward()
        seconds.append(clock() - start)
        peak = max(peak, (resident("VmHWM") if on_cpu else torch.cuda.max_memory_allocated() / 1e6) - before)
    return {**vars(variant), "peak_mb": round(peak, 1), "seconds": round(min(seconds), 4)}


def waiting_clock() -> float:
    """Wall time when the GPU has done all that it was asked."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(on_cpu: bool) -> float:
    """Make the high-water mark start here (resident memory: Linux only); returns MB held now."""
    if not on_cpu:
        import torch

        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 1e6
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident("VmRSS")


def resident(field: str) -> float:
    """MB (10^6 bytes), as the kernel counts them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / 1e6


if __name__ == "__main__":
    main()
