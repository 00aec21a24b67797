"""Describes the machine that a measurement runs on, and chooses how to measure time on it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time

import torch
import transformers

from medusa.clocks import synchronize
from medusa.cpu import cpuinfo


@dataclass
class Machine:
    """The hardware and the software versions that a measurement ran with."""

    processor: str
    gpu: str | None
    threads: int  # number of CPU threads that PyTorch uses
    system: str
    python: str
    torch: str
    transformers: str

    @property
    def device(self) -> str:
        """The name of the GPU, or of the processor if there is no GPU."""
        return self.gpu or self.processor


def machine() -> Machine:
    """Describe the machine that this process runs on."""
    names = cpuinfo("model name")
    return Machine(
        processor=f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        threads=torch.get_num_threads(),
        system=platform.platform(),
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
    )


def commit() -> str | None:
    """Return the git commit of the checkout that contains this code; `None` for an installed package or without git."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or None


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Choose a clock for timing work on `device`. Calling the clock returns seconds since an arbitrary moment.

    For a CPU with one thread, the clock counts the CPU time of this thread, which other programs do not change. For a
    GPU, the clock first waits until `device` has finished its work, which need not be PyTorch's current device."""
    if device.type == "cpu":
        return thread_time if torch.get_num_threads() == 1 else perf_counter

    def waited() -> float:
        synchronize(device)
        return perf_counter()

    return waited


class Moment:
    """A moment in the work of a device. On a GPU it is an event in the queue of work, so the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        """Note the moment when `device` has finished the work that it was given so far."""
        self.time, self.event = perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    @property
    def is_past(self) -> bool:
        """Whether the device has reached this moment."""
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: Moment) -> float:
        """Compute the seconds from `earlier`, a moment of the same device, to this one, once this one is past."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1000
