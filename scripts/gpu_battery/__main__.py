"""Measure everything that needs a GPU, in three calls of under four minutes each, without a network.

    python -m scripts.gpu_battery --output runs/battery                  all three calls, in ten minutes
    python -m scripts.gpu_battery --call 1 --output runs/battery         backbone, heads, checks
    python -m scripts.gpu_battery --call 2 --output runs/battery         benchmark, curves
    python -m scripts.gpu_battery --call 3 --output runs/battery         kinds, verify, losses, sharding
    python -m scripts.gpu_battery --stage curves --output runs/battery   one stage again
    python -m scripts.gpu_battery --rehearse --output runs/rehearsal     every stage at toy size, on any CPU
    python -m scripts.gpu_battery --rehearse --device cuda --output runs/rehearsal     the same on a GPU
    python -m scripts.gpu_battery --report --output runs/battery         only write report.md again

Run the battery from the root of the repository; only the dependencies of the packages must be installed. Each figure
is appended to figures.jsonl at once, with the GPU's clock and power; report.md is one page of tables. Each stage is a
process with a time limit, so a stage that fails or hangs does not affect the figures of other stages. Stages that time
nothing run side by side. The second and third calls need the folders that the first one wrote.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch

from decode.bench.machine import commit, machine
from medusa.errors import RequestError
from medusa.interruptions import interruptible
from medusa.loading import LoadOptions
from script_tools import run_script, script_parser
from scripts.gpu_battery.bench import benchmark, kinds, verify
from scripts.gpu_battery.checks import checks
from scripts.gpu_battery.curves import compile_curves, curves, losses, sharding
from scripts.gpu_battery.models import backbone, heads
from scripts.gpu_battery.report import write_report
from scripts.gpu_battery.run import FIGURES, Stage, append, run_group

BATTERY_SECONDS = 580  # for all stages, whose groups run one after another
REHEARSAL_FACTOR = 5  # for a slow or busy CPU
# The limits are in seconds. A region takes 2 s a layer to compile, and 4 s with its machine code on disk.
STAGES = {
    "backbone": Stage(backbone, call=1, group=1, seconds=120),  # sources and tokenizer 30 s, training
    "checks": Stage(checks, call=1, group=1, seconds=120),
    "compile": Stage(compile_curves, call=1, group=1, seconds=120),
    "heads": Stage(heads, call=1, group=2, seconds=130, needs=("backbone",)),  # texts, then all kinds side by side
    "benchmark": Stage(benchmark, call=2, group=3, seconds=110, needs=("heads",)),
    "curves": Stage(curves, call=2, group=4, seconds=120),
    "kinds": Stage(kinds, call=3, group=5, seconds=50, needs=("heads",)),
    "verify": Stage(verify, call=3, group=6, seconds=50, needs=("heads",)),
    "losses": Stage(losses, call=3, group=6, seconds=50),  # eight losses of 3 to 5 s
    "sharding": Stage(sharding, call=3, group=6, seconds=50),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="keep figures, models and logs here")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--call", type=int, choices=(1, 2, 3), help="run the stages of this call (default: all calls)")
    what.add_argument("--stage", nargs="+", choices=STAGES, help="run these stages")
    what.add_argument("--report", action="store_true", help="run nothing, only write report.md")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, to see that every stage runs")
    parser.add_argument("--device", help="measure this GPU (default: cuda; with --rehearse: cpu)")
    parser.add_argument("--commit", default=commit(), metavar="ID", help="record this commit (default: the checkout's)")
    args = parser.parse_args(argv)
    args.device = args.device or ("cpu" if args.rehearse else "cuda")
    if not (args.rehearse or args.report or torch.cuda.is_available()):
        raise RequestError("PyTorch sees no GPU here; --rehearse runs every stage at toy size on a CPU")
    LoadOptions(device="cpu" if args.report else args.device)  # RequestError: there is no such GPU
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(lambda: f"{args.output / FIGURES} keeps the figures so far"):
            return 0 if args.report else run_stages(args)
    finally:
        print(write_report(args.output, STAGES))


def run_stages(args: argparse.Namespace) -> int:
    """Run the groups of the requested stages in order, stages of a group side by side; return 0 if all finished."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # which the stages' processes read when they import
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process; several compile at the same time
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"stage": "machine", "event": "start", "toy": args.rehearse, "date": date, "commit": args.commit}
    append(args.output, about | asdict(machine()))
    names = args.stage or [name for name, stage in STAGES.items() if args.call in (None, stage.call)]
    end, finished = time.monotonic(), True
    for _, group in groupby(names, lambda name: STAGES[name].group):
        members = list(group)
        # A stage may also use the time that earlier stages did not use.
        end += max(STAGES[name].seconds for name in members) * (REHEARSAL_FACTOR if args.device == "cpu" else 1)
        for part in [[name] for name in members] if args.device == "cpu" else [members]:  # few cores run one at a time
            stages = {name: STAGES[name] for name in part}
            outcomes = run_group(stages, args.output, args.rehearse, args.device, end - time.monotonic())
            for name, outcome in outcomes.items():
                print(f"{name}: {outcome['status']}, {outcome['seconds']} s", outcome.get("error", ""), flush=True)
                finished &= outcome["status"] == "done"
    return 0 if finished else 1


if __name__ == "__main__":
    run_script(main)
