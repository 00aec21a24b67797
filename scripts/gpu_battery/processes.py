"""A stage runs in a separate process, which is ended with all its children at the stage's limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import transformers

from medusa.memory import peak_memory
from scripts.gpu_battery.run import Figure, Run, append, read_figures
from scripts.gpu_battery.scale import FULL, TOY
from scripts.gpu_battery.stages import STAGES


def run_stage(name: str, output: Path, toy: bool, device: str, seconds: float) -> Figure:
    """Run a stage and keep how it ended: done, failed, cut off or skipped."""
    append(output, {"stage": name, "event": "start"})
    figures = read_figures(output)
    lacking = [needed for needed in STAGES[name].needs if not kept_figures(figures.get(needed, ()))]
    start = time.monotonic()
    if lacking:
        outcome: Figure = {"status": "skipped", "error": f"needs {lacking[0]}"}
    else:
        outcome = watch(name, output, toy, device, seconds)
    outcome = {"seconds": round(time.monotonic() - start)} | outcome
    append(output, {"stage": name, "event": "end"} | outcome)
    return outcome


def kept_figures(figures: Sequence[Figure]) -> bool:
    """Whether a stage has measured or made anything: one that was cut off may have made what others need."""
    return any("event" not in figure and "error" not in figure for figure in figures)


def watch(name: str, output: Path, toy: bool, device: str, seconds: float) -> Figure:
    """Start the stage's process and wait for it."""
    # A forked process need not import anything again, but CUDA cannot be used in one.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    log = output / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    process = context.Process(target=in_process, args=(name, output, toy, device, seconds, log))
    process.start()
    process.join(seconds)
    in_time = process.exitcode is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what a finished stage has left running
    process.kill()
    process.join()
    if not in_time:
        return {"status": "cut off", "error": f"not finished after {seconds:.0f} s"}
    if process.exitcode:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        return {"status": "failed", "error": lines[-1].strip() if lines else f"exit status {process.exitcode}"}
    return {"status": "done"}


def in_process(name: str, output: Path, toy: bool, device: str, seconds: float, log: Path) -> None:
    """The body of the stage's process; its output goes to the log."""
    os.setpgid(0, 0)  # a new group, so that its children can be ended with it
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # a parent may replace them
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.set_seed(0)
    run = Run(name, output, TOY if toy else FULL, device, seconds)
    if toy:
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # not allowed after a fork
        torch.compile = lambda function, **options: function  # the battery is rehearsed, not the compiler
    try:
        STAGES[name].run(run)
        if not kept_figures(kept := read_figures(output)[name]):
            raise RuntimeError(kept[-1].get("error", "the stage kept no figure"))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    peak = {place: size // 10**6 for place, size in peak_memory().items()}
    append(output, {"stage": name, "event": "memory", "peak_mb": peak})
