"""The table of stages, and the process that runs a stage until its time limit.

A new stage is a function of a `Run` and a line in `STAGES`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from medusa.memory import peak_memory
from scripts.gpu_battery.curves import curves, losses, sharding
from scripts.gpu_battery.models import backbone, benchmark, heads, kinds, verify
from scripts.gpu_battery.run import FULL, TOY, Figure, Run, append, read_figures

CALL_SECONDS = 520  # of the nine minutes of a call; the rest is for starting up and for the report


@dataclass(frozen=True)
class Stage:
    """A part of a call, which measures or trains something in a separate process."""

    run: Callable[[Run], None]
    call: int
    seconds: int  # the stage's share of the call; time that earlier stages did not use is added
    needs: tuple[str, ...] = ()  # stages that must have produced figures before this stage can run


STAGES = {
    "curves": Stage(curves, call=1, seconds=380),
    "losses": Stage(losses, call=1, seconds=80),
    "sharding": Stage(sharding, call=1, seconds=60),
    "backbone": Stage(backbone, call=2, seconds=240),
    "heads": Stage(heads, call=2, seconds=280, needs=("backbone",)),
    "benchmark": Stage(benchmark, call=3, seconds=210, needs=("heads",)),
    "verify": Stage(verify, call=3, seconds=90, needs=("heads",)),
    "kinds": Stage(kinds, call=3, seconds=220, needs=("heads",)),
}


def run_stage(name: str, output: Path, toy: bool, device: str, seconds: float) -> Figure:
    """Run a stage, and record and return how it ended: done, failed, cut off or skipped."""
    append(output, {"stage": name, "event": "start"})
    figures, start = read_figures(output), time.monotonic()
    missing = [needed for needed in STAGES[name].needs if not kept_figures(figures.get(needed, ()))]
    if missing:
        outcome: Figure = {"status": "skipped", "error": f"needs {missing[0]}"}
    else:
        outcome = watch(name, output, toy, device, seconds)
    outcome = {"seconds": round(time.monotonic() - start)} | outcome
    append(output, {"stage": name, "event": "end"} | outcome)
    return outcome


def kept_figures(figures: Sequence[Figure]) -> bool:
    """Tell whether a stage produced a figure. If so, stages that need it can run, even if it was cut off later."""
    return any("event" not in figure and "error" not in figure for figure in figures)


def watch(name: str, output: Path, toy: bool, device: str, seconds: float) -> Figure:
    """Run the stage in a new process; after `seconds`, end the process with all its children."""
    # A forked process need not import anything again, but CUDA cannot be used in one.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    log = output / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    process = context.Process(target=in_process, args=(name, output, toy, device, seconds, log))
    process.start()
    process.join(seconds)
    in_time = process.exitcode is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also children that a finished stage left running
    process.kill()
    process.join()
    if not in_time:
        return {"status": "cut off", "error": f"not finished after {seconds:.0f} s"}
    if process.exitcode:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {process.exitcode}")
        return {"status": "failed", "error": last}
    return {"status": "done"}


def in_process(name: str, output: Path, toy: bool, device: str, seconds: float, log: Path) -> None:
    """Run the stage in this process, with its output in the file `log`."""
    os.setpgid(0, 0)  # a new group, so that its children can be ended with it
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # a parent may replace them
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.set_seed(0)
    if toy:
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # not allowed after a fork
        torch.compile = lambda function, **options: function  # the battery is rehearsed, not the compiler
    try:
        STAGES[name].run(Run(name, output, TOY if toy else FULL, device, seconds))
        if not kept_figures(kept := read_figures(output)[name]):
            raise RuntimeError(kept[-1].get("error", "the stage kept no figure"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    peak = {place: size // 10**6 for place, size in peak_memory().items()}
    append(output, {"stage": name, "event": "memory", "peak_mb": peak})
