"""Stages: their context (sizes and folders), the file of all figures, and the process of a stage."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
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
START_SECONDS = 60  # in which a process must be able to use the GPU
# Sizes of everything that the battery measures. scale.yaml says what each one means.
SIZES = yaml.safe_load(Path(__file__).with_name("scale.yaml").read_text(encoding="utf-8"))
FULL, TOY = (SimpleNamespace(**SIZES[size]) for size in ("full", "toy"))


def append(output: Path, figure: Figure) -> None:
    """Append a figure to the file of figures; the line is on disk when this function returns.

    It starts a new line if a stage was ended while it wrote the last one."""
    with (output / FIGURES).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            is_whole = file.read() == b"\n"
        else:
            is_whole = True
        file.write(b"" if is_whole else b"\n")
        file.write(json.dumps(figure).encode() + b"\n")


def read_figures(output: Path) -> dict[str, list[Figure]]:
    """Read the figures of the last run of each stage, in the order in which the stages ran.

    A run that goes on where the last one was cut off has the figures of both, without the errors of the first. A line
    that is not complete, because its stage was ended while it wrote, is left out."""
    found: dict[str, list[Figure]] = {}
    place = output / FIGURES
    for line in place.read_text(encoding="utf-8").splitlines() if place.is_file() else ():
        try:
            figure = json.loads(line)
        except json.JSONDecodeError:
            continue
        if figure.get("event") == "start":
            earlier = found.pop(figure["stage"], [])
            if figure.get("goes_on"):
                found[figure["stage"]] = [one for one in earlier if not {"event", "error"} & set(one)]
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
    folder: str = ""  # in `output`, with a backbone of its own; `scale` may hold other sizes for it

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.on_gpu, self.toy = self.device != "cpu", self.scale is TOY
        self.scale = SimpleNamespace(**vars(self.scale) | vars(self.scale).get(self.folder, {}))
        self.kept = read_figures(self.output).get(self.stage, [])
        self.goes_on = any(figure.get("goes_on") for figure in self.kept)  # with an earlier run, which was cut off
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        home = self.output / self.folder
        self.backbone, self.prompts = home / "backbone", home / "prompts.jsonl"
        self.openings, self.own = home / "openings.jsonl", home / "own.jsonl"  # prompts, and the text after them
        self.heads = home / "heads"  # in a folder for each kind
        self.ways: dict[str, dict[str, object]] = {}
        for how, way in SIZES["ways"].items():
            way = way if self.on_gpu else {key: value for key, value in way.items() if key != "cuda_graphs"}
            if way not in self.ways.values():  # without a GPU, CUDA graphs of any kind are the same
                self.ways[how] = way
        self.errors: list[str] = []  # of attempts
        self.succeeded = False  # whether an attempt ended without an error

    def clocks(self) -> Figure:
        """Read the GPU's clock, power and temperature, for work that has just ended; {} on a CPU."""
        return gpu_state(torch.device(self.device)) if self.on_gpu else {}

    def forget_peak(self) -> None:
        """Begin a new peak of the GPU's memory."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> Figure:
        """Read the peak of the GPU's memory, weights included, since `forget_peak`; {} on a CPU."""
        return {"peak_mb": round(torch.cuda.max_memory_allocated(self.device) / 1e6)} if self.on_gpu else {}

    def has_kept(self, **about: object) -> bool:
        """Whether a figure with these fields was kept by the run that this one goes on with."""
        return any(about.items() <= figure.items() for figure in self.kept if "error" not in figure)

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
    """A part of the battery, which measures or trains something in a separate process."""

    run: Callable[[Run], None]
    seconds: int  # after which it is cut off
    needs: tuple[str, ...] = ()  # stages that must have ended, and have produced figures, before this stage starts
    folder: str = ""  # of `Run`


def run_stages(
    stages: Mapping[str, Stage], output: Path, toy: bool, device: str, seconds: float, factor: int = 1
) -> dict[str, Figure]:
    """Run stages one after another, and record and return how each ended: done, failed, cut off or skipped.

    Each stage is a new process. It ends with its children after `factor` times its own limit, after `seconds` of the
    battery, or if this process is interrupted. A stage that has not begun by then keeps its earlier figures. A stage
    that was cut off or interrupted goes on: it keeps its figures, and may leave out what they measure."""
    battery_end, context = time.monotonic() + seconds, processes(device)
    outcomes: dict[str, Figure] = {}
    for name, stage in stages.items():
        begin = time.monotonic()
        limit = min(factor * stage.seconds, battery_end - begin)
        missing = [needed for needed in stage.needs if needed not in usable_stages(output)]
        if missing or limit <= 0:
            outcome = {"status": "skipped", "error": f"needs {missing[0]}" if missing else "no time was left"}
        else:
            append(output, {"stage": name, "event": "start", "goes_on": was_cut_off(output, name)})
            process = context.Process(target=in_process, args=(name, stage, output, toy, device, limit))
            try:
                start(process)
                process.join(limit)
                outcome = {"status": "cut off", "error": f"not finished after {limit:.0f} s"}
                if process.exitcode is not None:
                    outcome = outcome_of(process, log_of(output, name))
            finally:
                kill(process)
        outcomes[name] = {"seconds": round(time.monotonic() - begin)} | outcome
        if outcome["status"] != "skipped" or name not in read_figures(output):
            append(output, {"stage": name, "event": "end"} | outcomes[name])
        print(f"{name}: {outcome['status']}", outcome.get("error", ""), flush=True)
    return outcomes


def finished_stages(output: Path) -> list[str]:
    """List the stages that have finished in this or an earlier run."""
    return [name for name, figures in read_figures(output).items() if figures[-1].get("status") == "done"]


def was_cut_off(output: Path, name: str) -> bool:
    """Whether the last run of a stage ended before its time: it was cut off, or interrupted and has no end."""
    figures = read_figures(output).get(name)
    return bool(figures) and figures[-1].get("status", "cut off") == "cut off"


def usable_stages(output: Path) -> list[str]:
    """List the stages that have produced figures; figures made before a cut are enough."""
    kept = read_figures(output)
    return [name for name, figures in kept.items() if any(not {"event", "error"} & set(figure) for figure in figures)]


def start(process: BaseProcess) -> None:
    """Start a process. Signals wait, because Python drops an exception that a signal raises right after a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def processes(device: str) -> BaseContext:
    """Choose how to start processes: a forked one need not import anything again, but may be unable to use the GPU."""
    if device == "cpu":
        return multiprocessing.get_context("fork")
    trial = multiprocessing.get_context("fork").Process(target=try_gpu, args=(device,))
    start(trial)
    trial.join(START_SECONDS)
    if trial.exitcode is None:
        kill(trial)
    return multiprocessing.get_context("spawn" if trial.exitcode else "fork")


def try_gpu(device: str) -> None:
    """Use the GPU; an error ends this process with another status than 0."""
    torch.zeros(1, device=device).item()
    os._exit(0)


def kill(process: BaseProcess) -> None:
    """End a process and its children, also those that a finished stage left running."""
    if process.pid is None:  # never started
        return
    with suppress(ProcessLookupError):  # it has no group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def log_of(output: Path, name: str) -> Path:
    return output / "logs" / f"{name}.log"


def outcome_of(process: BaseProcess, log: Path) -> Figure:
    """Say how a finished stage ended, with the last line of its log if it failed."""
    if not process.exitcode:
        return {"status": "done"}
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {process.exitcode}")
    return {"status": "failed", "error": last}


def use_gpu(device: str) -> None:
    """Make the GPU the current one of this process, without cuDNN's attention, as the `medusa` commands run."""
    torch.cuda.set_device(torch.device(device).index or 0)  # which refuses "cuda"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it prepares a plan for each length of the text (docs/log.md)


def in_process(name: str, stage: Stage, output: Path, toy: bool, device: str, seconds: float) -> None:
    """Run the stage in this process, with its output in its log."""
    os.setpgid(0, 0)  # a new group, so that its children are ended with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked by `start` while this process began
    log = log_of(output, name)
    log.parent.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)  # a parent may replace them
    run = Run(name, output, TOY if toy else FULL, device, seconds, stage.folder)
    transformers.set_seed(0)
    if device != "cpu":
        use_gpu(device)
    else:
        torch.set_num_threads(1)
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # not allowed after a fork
        torch.compile = lambda function, **options: function  # the battery is rehearsed, not the compiler
    try:
        stage.run(run)
        if run.errors and not run.succeeded:
            raise RuntimeError(run.errors[-1])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    peak = {place: size // 10**6 for place, size in peak_memory().items()}
    append(output, {"stage": name, "event": "memory", "peak_mb": peak})
