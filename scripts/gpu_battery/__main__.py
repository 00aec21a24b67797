"""Measure everything that needs a GPU, in one call of ten minutes, without a network.

    python -m scripts.gpu_battery --output runs/battery                  everything
    python -m scripts.gpu_battery --stage MHA GQA --output runs/battery  these stages again
    python -m scripts.gpu_battery --rehearse --output runs/rehearsal     every stage at toy size, on any CPU
    python -m scripts.gpu_battery --rehearse --device cuda --output runs/rehearsal     the same on a GPU
    python -m scripts.gpu_battery --report --output runs/battery         only write report.md again

Run the battery from the root of the repository; only the dependencies of the packages must be installed. Each figure
is appended to figures.jsonl at once, with the GPU's clock and power; report.md is one page of tables. Each stage is a
process with a time limit, so a stage that fails or hangs does not affect the figures of other stages. Stages run side
by side, so that one can compile while another one trains. While something is timed, nothing trains, and all other
stages are stopped.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

# Otherwise the question whether there is a GPU keeps forked processes from using it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from decode.bench.machine import commit, machine
from medusa.errors import RequestError
from medusa.heads import KINDS
from medusa.interruptions import interruptible
from medusa.loading import LoadOptions
from script_tools import run_script, script_parser
from scripts.gpu_battery.bench import MAIN_KIND, benchmark, kinds, verify
from scripts.gpu_battery.checks import checks
from scripts.gpu_battery.curves import curves, losses, sharding
from scripts.gpu_battery.models import backbone, text, train
from scripts.gpu_battery.report import write_report
from scripts.gpu_battery.run import FIGURES, START_SECONDS, Figure, Stage, append, kill, processes, run_stages, start

BATTERY_SECONDS = 570
REHEARSAL_FACTOR = 5  # for a slow or busy CPU
STAGES = {  # limits in seconds, of one GPU with 16 CPU cores
    "backbone": Stage(backbone, 150),
    "MHA": Stage(partial(curves, model="MHA"), 480),
    "GQA": Stage(partial(curves, model="GQA"), 480),
    "checks": Stage(checks, 400),
    "sharding": Stage(sharding, 100),
    "text": Stage(text, 60, needs=("backbone",)),
    **{f"train {kind}": Stage(partial(train, kind=kind), 100, needs=("text",)) for kind in KINDS},
    "benchmark": Stage(benchmark, 440, needs=(f"train {MAIN_KIND}",)),
    "kinds": Stage(kinds, 440, needs=tuple(f"train {kind}" for kind in KINDS)),
    "losses": Stage(losses, 100, needs=("MHA", "GQA")),
    "verify": Stage(verify, 250, needs=("benchmark", "kinds")),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="keep figures, models and logs here")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stage", nargs="+", choices=STAGES, help="run these stages (default: all)")
    what.add_argument("--report", action="store_true", help="run nothing, only write report.md")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, to see that every stage runs")
    parser.add_argument("--device", help="measure this GPU (default: cuda; with --rehearse: cpu)")
    parser.add_argument(
        "--seconds", type=int, default=BATTERY_SECONDS, metavar="N", help="end after N seconds (default: %(default)s)"
    )
    parser.add_argument("--commit", default=commit(), metavar="ID", help="record this commit (default: the checkout's)")
    args = parser.parse_args(argv)
    args.device = args.device or ("cpu" if args.rehearse else "cuda")
    if not (args.rehearse or args.report or torch.cuda.is_available()):
        raise RequestError("PyTorch sees no GPU here; --rehearse runs every stage at toy size on a CPU")
    LoadOptions(device="cpu" if args.report else args.device)  # RequestError: there is no such GPU
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(lambda: f"{args.output / FIGURES} keeps the figures so far"):
            return 0 if args.report else run_battery(args)
    finally:
        print(write_report(args.output, STAGES))


def run_battery(args: argparse.Namespace) -> int:
    """Run the requested stages; return 0 if all finished."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # which the stages' processes read when they import
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each process; several compile at the same time
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"stage": "machine", "event": "start", "toy": args.rehearse, "date": date, "commit": args.commit}
    describing = processes(args.device).Process(target=describe_machine, args=(args.output, about))
    start(describing)  # in a process of its own, because forked processes could not use a GPU that this one has used
    describing.join(START_SECONDS)
    if describing.exitcode is None:
        kill(describing)
        append(args.output, about | {"error": f"describing the machine took more than {START_SECONDS} s"})
    stages = {name: STAGES[name] for name in args.stage or STAGES}
    limits = (REHEARSAL_FACTOR * args.seconds, REHEARSAL_FACTOR) if args.device == "cpu" else (args.seconds, 1)
    outcomes = run_stages(stages, args.output, args.rehearse, args.device, *limits)
    return 0 if all(outcome["status"] == "done" for outcome in outcomes.values()) else 1


def describe_machine(output: Path, about: Figure) -> None:
    """Record the machine; if it cannot be described, the reason."""
    try:
        about |= asdict(machine())
    except Exception as error:  # whatever a driver or a library raises: the figures are worth having without it
        about["error"] = f"{type(error).__name__}: {error}"
    append(output, about)


if __name__ == "__main__":
    run_script(main)
