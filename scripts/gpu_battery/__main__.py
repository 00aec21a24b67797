"""Measure everything that needs a GPU, in three calls of under nine minutes each, without a network.

    python -m scripts.gpu_battery --call 1 --output runs/battery     curves, losses, sharding
    python -m scripts.gpu_battery --call 2 --output runs/battery     backbone, heads
    python -m scripts.gpu_battery --call 3 --output runs/battery     benchmark, verify, kinds
    python -m scripts.gpu_battery --stage curves --output runs/battery     one stage again
    python -m scripts.gpu_battery --rehearse --output runs/rehearsal     every stage at toy size, on any CPU
    python -m scripts.gpu_battery --report --output runs/battery     only write report.md again

Run the battery from the root of the repository; only the dependencies of the packages must be installed. Each figure
is appended to figures.jsonl at once, with the GPU's clocks and power; report.md is one page of tables. Each stage is a
process with a time limit, so a stage that fails or hangs does not affect the figures of other stages.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from decode.bench.machine import commit, machine
from medusa.errors import RequestError
from script_tools import run_script, script_parser
from scripts.gpu_battery.report import write_report
from scripts.gpu_battery.run import append
from scripts.gpu_battery.stages import STAGES, run_stage

REHEARSAL_FACTOR = 5  # for a slow or busy CPU


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
    args.output.mkdir(parents=True, exist_ok=True)
    status = 0 if args.report else run_stages(args)
    print(write_report(args.output))
    return status


def run_stages(args: argparse.Namespace) -> int:
    """Run the requested stages in order; return 0 if all of them finished, else 1.

    Raises:
        RequestError: there is no GPU, and `--rehearse` was not given."""
    toy = args.rehearse
    if not toy and not torch.cuda.is_available():
        raise RequestError("PyTorch sees no GPU here; --rehearse runs every stage at toy size on a CPU")
    names = args.stage or [name for name, stage in STAGES.items() if args.call in (None, stage.call)]
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"stage": "machine", "event": "start", "toy": toy, "date": date, "commit": commit()}
    append(args.output, about | asdict(machine()))
    factor = REHEARSAL_FACTOR if toy else 1
    end, finished = time.monotonic(), True
    for name in names:
        end += factor * STAGES[name].seconds  # a stage may also use the time that earlier stages did not use
        print(f"{name} ...", end=" ", flush=True)
        outcome = run_stage(name, args.output, toy, "cpu" if toy else args.device, end - time.monotonic())
        print(f"{outcome['status']}, {outcome['seconds']} s", outcome.get("error", ""), flush=True)
        finished &= outcome["status"] == "done"
    return 0 if finished else 1


if __name__ == "__main__":
    run_script(main)
