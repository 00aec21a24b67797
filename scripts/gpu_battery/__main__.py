"""Measure everything that needs a GPU, in three calls of under nine minutes each, without a network.

    python -m scripts.gpu_battery --call 1 --output runs/battery     curves, losses, sharding
    python -m scripts.gpu_battery --call 2 --output runs/battery     backbone, heads, checks
    python -m scripts.gpu_battery --call 3 --output runs/battery     benchmark, verify, kinds
    python -m scripts.gpu_battery --stage curves --output runs/battery     one stage again
    python -m scripts.gpu_battery --rehearse --output runs/rehearsal     every stage at toy size, on any CPU
    python -m scripts.gpu_battery --report --output runs/battery     only write report.md again

Run the battery from the root of the repository; only the dependencies of the packages must be installed. Each figure
is appended to figures.jsonl at once, with the GPU's clock and power; report.md is one page of tables. Each stage is a
process with a time limit, so a stage that fails or hangs does not affect the figures of other stages. The third call
needs the folders that the second one wrote.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from decode.bench.machine import commit, machine
from medusa.errors import RequestError
from medusa.interruptions import interruptible
from medusa.loading import LoadOptions
from script_tools import run_script, script_parser
from scripts.gpu_battery.bench import benchmark, kinds, verify
from scripts.gpu_battery.checks import checks
from scripts.gpu_battery.curves import curves, losses, sharding
from scripts.gpu_battery.models import backbone, heads
from scripts.gpu_battery.report import write_report
from scripts.gpu_battery.run import FIGURES, Stage, append, run_stage

CALL_SECONDS = 520  # of the nine minutes of a call; the rest is for starting up and for the report
REHEARSAL_FACTOR = 5  # for a slow or busy CPU
# Limits in seconds, from estimates for an H100: no stage has run on a GPU. A process takes 10 s to start, a region 2 s
# a layer to compile, a point of the curves in eager steps 3 s.
STAGES = {
    # 32 compiled points of 17 s are more than there is time for; 32 eager ones take 90 s.
    "curves": Stage(curves, call=1, seconds=400),
    "losses": Stage(losses, call=1, seconds=70),  # 8 losses of 3 to 5 s
    "sharding": Stage(sharding, call=1, seconds=50),
    "backbone": Stage(backbone, call=2, seconds=220),  # 132 s of training; sources and tokenizer 40 s
    "heads": Stage(heads, call=2, seconds=210, needs=("backbone",)),  # texts 30 s, training 45 s and four times 18 s
    "checks": Stage(checks, call=2, seconds=90),  # four regions 20 s, memory 15 s, waits 15 s, masks 20 s
    # Regions: plain, two trees, and three forwards alone 110 s; compiled `generate` 40 s; eager methods 60 s.
    "benchmark": Stage(benchmark, call=3, seconds=250, needs=("heads",)),
    "verify": Stage(verify, call=3, seconds=90, needs=("heads",)),  # 800,000 draws in each dtype 20 s
    "kinds": Stage(kinds, call=3, seconds=180, needs=("heads",)),  # six regions of 20 to 28 s with 64 nodes
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="keep figures, models and logs here")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--call", type=int, choices=(1, 2, 3), help="run the stages of this call (default: all calls)")
    what.add_argument("--stage", nargs="+", choices=STAGES, help="run these stages")
    what.add_argument("--report", action="store_true", help="run nothing, only write report.md")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU, to see that every stage runs")
    parser.add_argument("--device", default="cuda", help="the GPU (default: %(default)s)")
    args = parser.parse_args(argv)
    if not (args.rehearse or args.report or torch.cuda.is_available()):
        raise RequestError("PyTorch sees no GPU here; --rehearse runs every stage at toy size on a CPU")
    LoadOptions(device="cpu" if args.rehearse or args.report else args.device)  # RequestError: there is no such GPU
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(lambda: f"{args.output / FIGURES} keeps the figures so far"):
            return 0 if args.report else run_stages(args)
    finally:
        print(write_report(args.output, STAGES))


def run_stages(args: argparse.Namespace) -> int:
    """Run the requested stages in order; return 0 if all finished, else 1."""
    toy = args.rehearse
    os.environ["HF_HUB_OFFLINE"] = "1"  # which the stages' processes read when they import
    names = args.stage or [name for name, stage in STAGES.items() if args.call in (None, stage.call)]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"stage": "machine", "event": "start", "toy": toy, "date": date, "commit": commit()}
    append(args.output, about | asdict(machine()))
    factor = REHEARSAL_FACTOR if toy else 1
    end, finished = time.monotonic(), True
    for name in names:
        end += factor * STAGES[name].seconds  # a stage may also use the time that earlier stages did not use
        print(f"{name} ...", end=" ", flush=True)
        outcome = run_stage(name, STAGES[name], args.output, toy, "cpu" if toy else args.device, end - time.monotonic())
        print(f"{outcome['status']}, {outcome['seconds']} s", outcome.get("error", ""), flush=True)
        finished &= outcome["status"] == "done"
    return 0 if finished else 1


if __name__ == "__main__":
    run_script(main)
