"""Stages: their context (sizes, folders, GPU monitor), the file of all figures, and the process of a stage."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import yaml

from medusa.__main__ import main as medusa
from medusa.files import read_json
from medusa.interruptions import SIGNALS
from medusa.memory import peak_memory
from scripts.gpu_battery.clocks import gpu_state

Figure = dict[str, object]
FIGURES = "figures.jsonl"
# Sizes of everything that the battery measures. scale.yaml says what each one means.
SIZES = yaml.safe_load(Path(__file__).with_name("scale.yaml").read_text(encoding="utf-8"))
FULL, TOY = (SimpleNamespace(ways=SIZES["ways"], **SIZES[size]) for size in ("full", "toy"))


def append(output: Path, figure: Figure) -> None:
    """Append a figure to the file of figures; the line is on disk when this function returns."""
    with (output / FIGURES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(figure) + "\n")


def read_figures(output: Path) -> dict[str, list[Figure]]:
    """Read the figures of the last run of each stage, in the order in which the stages ran."""
    found: dict[str, list[Figure]] = {}
    place = output / FIGURES
    for line in place.read_text(encoding="utf-8").splitlines() if place.is_file() else ():
        figure = json.loads(line)
        if figure.get("event") == "start":
            found.pop(figure["stage"], None)
        found.setdefault(figure["stage"], []).append(figure)
    return found


@dataclass(eq=False)
class Run:
    """One run of one stage, which may take `seconds`."""

    stage: str
    output: Path
    scale: SimpleNamespace
    device: str
    seconds: float

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.on_gpu = self.device != "cpu"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.backbone, self.prompts = self.output / "backbone", self.output / "prompts.jsonl"
        self.heads = self.output / "heads"  # in a folder for each kind
        self.errors: list[str] = []  # of attempts
        self.succeeded = False  # whether an attempt ended without an error

    def clocks(self) -> Figure:
        """Read the GPU's clock, power and temperature, for work that has just ended; {} on a CPU."""
        return gpu_state(torch.device(self.device)) if self.on_gpu else {}

    def keep(self, **figure: object) -> None:
        """Append a figure of this stage to the file of figures, with the GPU's clocks unless it holds them already."""
        clocks = {} if "celsius" in figure else self.clocks()
        append(self.output, {"stage": self.stage} | figure | clocks)

    @contextmanager
    def attempt(self, **about: object) -> Iterator[None]:
        """Record an exception inside the block as a figure, so that the stage goes on with its other figures.

        An error of the GPU itself, such as a wrong address, is raised: after it, no kernel can run in this process."""
        earlier = len(self.errors)
        try:
            yield
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}".splitlines()[0][:300])
            append(self.output, {"stage": self.stage} | about | {"error": self.errors[-1]})
            if "CUDA error" in self.errors[-1] and "out of memory" not in self.errors[-1]:
                raise
        self.succeeded |= len(self.errors) == earlier  # an attempt inside this one may have failed

    def require_no_errors(self) -> None:
        """Raise RuntimeError with the last error of an attempt, for stages whose attempts must all succeed."""
        if self.errors:
            raise RuntimeError(self.errors[-1])

    def medusa(self, command: str, *more: object, result: str | None = None) -> dict[str, object]:
        """Run a `medusa` command; return the JSON file named `result`. RuntimeError: it failed and wrote no JSON."""
        argv, place = [command, *map(str, more)], self.output / "json" / f"{result}.json"
        if result:
            place.parent.mkdir(exist_ok=True)
            place.unlink(missing_ok=True)
            argv += ["--json", str(place)]
        print("$ medusa", *argv, flush=True)
        status = medusa(argv)
        if place.is_file():
            return read_json(place)
        if status:
            raise RuntimeError(f"medusa {command} ended with status {status}; see the log")
        return {}


@dataclass(frozen=True)
class Stage:
    """A part of a call, which measures or trains something in a separate process."""

    run: Callable[[Run], None]
    call: int
    seconds: int  # the stage's share of the call; time that earlier stages did not use is added
    needs: tuple[str, ...] = ()  # stages that must have produced figures before this stage can run


def run_stage(name: str, stage: Stage, output: Path, toy: bool, device: str, seconds: float) -> Figure:
    """Run a stage, and record and return how it ended: done, failed, cut off or skipped."""
    append(output, {"stage": name, "event": "start"})
    figures, start = read_figures(output), time.monotonic()
    usable = [other for other, kept in figures.items() if any(not {"event", "error"} & set(figure) for figure in kept)]
    missing = [needed for needed in stage.needs if needed not in usable]  # figures made before a cut are enough
    if missing:
        outcome: Figure = {"status": "skipped", "error": f"needs {missing[0]}"}
    else:
        outcome = watch(name, stage, output, toy, device, seconds)
    outcome = {"seconds": round(time.monotonic() - start)} | outcome
    append(output, {"stage": name, "event": "end"} | outcome)
    return outcome


def watch(name: str, stage: Stage, output: Path, toy: bool, device: str, seconds: float) -> Figure:
    """Run the stage in a new process; after `seconds`, or if this process is interrupted, end it with its children."""
    # A forked process need not import anything again, but CUDA cannot be used in one.
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    log = output / "logs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    process = context.Process(target=in_process, args=(name, stage, output, toy, device, seconds, log))
    # Python drops an exception that a signal raises while functions run after a fork, so signals wait for its end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    process.start()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process.join(seconds)
        in_time = process.exitcode is not None
    finally:
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


def use_gpu(device: str) -> None:
    """Make the GPU the current one of this process, without cuDNN's attention, as the `medusa` commands run."""
    torch.cuda.set_device(torch.device(device).index or 0)  # which refuses "cuda"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it prepares a plan for each length of the text (stage `checks`)


def in_process(name: str, stage: Stage, output: Path, toy: bool, device: str, seconds: float, log: Path) -> None:
    """Run the stage in this process, with its output in the file `log`."""
    os.setpgid(0, 0)  # a new group, so that its children can be ended with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by `watch` while this process began
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # a parent may replace them
    transformers.set_seed(0)
    if device != "cpu":
        use_gpu(device)
    if toy:
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # not allowed after a fork
        torch.compile = lambda function, **options: function  # the battery is rehearsed, not the compiler
    try:
        stage.run(run := Run(name, output, TOY if toy else FULL, device, seconds))
        if run.errors and not run.succeeded:
            raise RuntimeError(run.errors[-1])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    peak = {place: size // 10**6 for place, size in peak_memory().items()}
    append(output, {"stage": name, "event": "memory", "peak_mb": peak})
