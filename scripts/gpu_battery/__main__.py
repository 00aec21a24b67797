"""Measure training and decoding on a GPU, in calls of ten minutes, without a network.

    python -m scripts.gpu_battery --output runs/battery                  all stages that have not finished there
    python -m scripts.gpu_battery --stage MHA GQA --output runs/battery  these stages again
    python -m scripts.gpu_battery --stage MHA GQA --unfinished ...       those of them that have not finished
    python -m scripts.gpu_battery --rehearse --output runs/rehearsal     every stage at toy size, on any CPU
    python -m scripts.gpu_battery --rehearse --device cuda --output runs/rehearsal     the same on a GPU
    python -m scripts.gpu_battery --report --output runs/battery         only write report.md again

Run the battery from the root of the repository; only the dependencies of the packages must be installed. Each figure
is appended to figures.jsonl at once, with the GPU's clock and power; report.md is one page of tables. Stages run one
after another. Each is a process with a time limit, so a stage that fails or hangs does not affect the figures of other
stages. A call ends after ten minutes, and the next one goes on with the stages that are left; a stage that was cut off
leaves out what it has measured.
"""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
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
from scripts.gpu_battery.bench import MAIN_KIND, benchmark, chat, kinds, verify
from scripts.gpu_battery.chat import chat_model, fit
from scripts.gpu_battery.curves import curves
from scripts.gpu_battery.models import backbone, text, train
from scripts.gpu_battery.report import write_report
from scripts.gpu_battery.run import FIGURES, FULL, START_SECONDS, Run, Stage, finished_stages, run_stages

BATTERY_SECONDS = 570
REHEARSAL_FACTOR = 5  # for a slow or busy CPU
CHAT = "chat"  # the folder of the chat model, with the layout of the battery's own
CHAT_HEADS = tuple(f"chat {kind}" for kind in FULL.chat["kinds"])
# Limits in seconds, of one GPU with 16 CPU cores. The stages of a chat model of 135 million parameters are planned, not
# measured: 10 s for its prompts, 60 for its text, 60 for each kind of heads, 720 for `chat` (see there), 350 for
# `chat verify` and 350 for `fit`. So the first call ends within `chat`, and the second one goes on there.
STAGES = {
    "backbone": Stage(backbone, 150),
    "8B": Stage(partial(curves, model="8B"), 480),
    "MHA": Stage(partial(curves, model="MHA"), 480),
    "GQA": Stage(partial(curves, model="GQA"), 480),
    "text": Stage(text, 60, needs=("backbone",)),
    **{f"train {kind}": Stage(partial(train, kind=kind), 100, needs=("text",)) for kind in KINDS},
    "benchmark": Stage(benchmark, 440, needs=(f"train {MAIN_KIND}",)),
    "kinds": Stage(kinds, 440, needs=tuple(f"train {kind}" for kind in KINDS)),
    "verify": Stage(verify, 250, needs=("benchmark", "kinds")),
    "chat model": Stage(chat_model, 60, needs=("backbone",), folder=CHAT),
    "chat text": Stage(text, 150, needs=("chat model",), folder=CHAT),
    **{f"chat {kind}": Stage(partial(train, kind=kind), 100, ("chat text",), CHAT) for kind in FULL.chat["kinds"]},
    "chat": Stage(chat, 560, needs=CHAT_HEADS, folder=CHAT),
    "chat verify": Stage(verify, 300, needs=CHAT_HEADS[:1], folder=CHAT),
    "fit": Stage(fit, 400, needs=("chat model",), folder=CHAT),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = script_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="keep figures, models and logs here")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--stage", nargs="+", choices=STAGES, help="run these stages (default: the unfinished ones)")
    parser.add_argument("--unfinished", action="store_true", help="leave out those of --stage that have finished")
    what.add_argument("--report", action="store_true", help="run nothing, only write report.md")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes, to see that every stage runs")
    parser.add_argument("--device", help="measure this GPU (default: cuda; with --rehearse: cpu)")
    parser.add_argument("--model", default="", metavar="DIR", help="the chat model (default: the battery's own)")
    parser.add_argument("--prompts", default="", metavar="FILE", help="prompts that --model answers, or their folder")
    parser.add_argument("--questions", default="", metavar="FILE", help="time answers to these (default: some prompts)")
    parser.add_argument(
        "--seconds", type=int, default=BATTERY_SECONDS, metavar="N", help="end after N seconds (default: %(default)s)"
    )
    parser.add_argument("--commit", default=commit(), metavar="ID", help="record this commit (default: the checkout's)")
    args = parser.parse_args(argv)
    args.device = args.device or ("cpu" if args.rehearse else "cuda")
    if not (args.rehearse or args.report or torch.cuda.is_available()):
        raise RequestError("PyTorch sees no GPU here; --rehearse runs every stage at toy size on a CPU")
    if bool(args.model) != bool(args.prompts):
        raise RequestError("--model and --prompts belong together: a chat model, and the prompts that it answers")
    LoadOptions(device="cpu" if args.report else args.device)  # RequestError: there is no such GPU
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with interruptible(lambda: f"{args.output / FIGURES} keeps the figures so far"):
            return 0 if args.report else run_battery(args)
    finally:
        print(write_report(args.output, STAGES))


def run_battery(args: argparse.Namespace) -> int:
    """Describe the machine, and run the requested stages or those that are left; return 0 if all finished."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # which the stages' processes read when they import
    finished = finished_stages(args.output)
    again = args.stage and not args.unfinished
    asked = [name for name in args.stage or STAGES if again or name not in finished]
    stages = {"machine": Stage(partial(describe, commit=args.commit), START_SECONDS)}
    stages |= {name: STAGES[name] for name in asked}
    if args.model and "chat model" in stages:
        given = {name: getattr(args, name) for name in ("model", "prompts", "questions")}
        stages["chat model"] = replace(STAGES["chat model"], run=partial(chat_model, **given), needs=())
    limits = (REHEARSAL_FACTOR * args.seconds, REHEARSAL_FACTOR) if args.device == "cpu" else (args.seconds, 1)
    outcomes = run_stages(stages, args.output, args.rehearse, args.device, *limits)
    return 0 if all(outcomes[name]["status"] == "done" for name in asked) else 1


def describe(run: Run, commit: str | None) -> None:
    """Record the machine, and what runs on it."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run.keep(toy=run.toy, date=date, commit=commit, **asdict(machine()))


if __name__ == "__main__":
    run_script(main)
