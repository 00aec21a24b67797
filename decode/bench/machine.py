"""The machine that figures were measured on, and its clock."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, thread_time

import torch
import transformers


@dataclass
class Machine:
    """Hardware and versions of one process."""

    processor: str
    gpu: str | None
    threads: int
    """CPU threads of PyTorch."""
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
    names = _cpuinfo("model name")
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
    """The git commit of the checkout that this code runs from; `None` for an installed package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip() or None


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX, Arm BF16); False if that is unknown."""
    return any({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()) for line in _cpuinfo("flags", "Features"))


def _cpuinfo(*fields: str) -> list[str]:
    """The values that Linux lists under these field names, one for each core; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    parts = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in parts if name.strip() in fields]


def stopwatch(device: torch.device) -> Callable[[], float]:
    """A clock in seconds for work done on `device`; only differences of its readings have a meaning.

    With one CPU thread it reads the thread's own time, which other work on the machine does not change. Before a GPU's
    time is read, its work is awaited.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return thread_time
    if device.type != "cuda":
        return perf_counter

    def waited() -> float:
        torch.cuda.synchronize()
        return perf_counter()

    return waited
