"""The machine that figures were measured on: without it, figures mean nothing."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
        """The name of the GPU, or of the processor where there is no GPU."""
        return self.gpu or self.processor


def machine() -> Machine:
    """Describe the machine that this process runs on."""
    return Machine(
        processor=_processor(),
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
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX-512 BF16, AMX, Arm BF16); False if that is unknown."""
    return any({"avx512_bf16", "amx_bf16", "bf16"} & set(line.split()) for line in _cpuinfo("flags", "Features"))


def _processor() -> str:
    names = _cpuinfo("model name")
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


def _cpuinfo(*fields: str) -> list[str]:
    """The values that Linux lists under these field names, one for each core; empty on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line.partition(":") for line in file]
    except OSError:
        return []
    return [value.strip() for name, _, value in lines if name.strip() in fields]
