"""The memory use of a module's parameters, and the peak memory of the process and of each GPU."""

from __future__ import annotations

import sys

import torch
from torch import nn


def peak_memory() -> dict[str, int]:
    """Return the peak memory in bytes: `process` for main memory, and `cuda:0` and so on for tensors on each GPU."""
    peak = {"process": _peak_of_process()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak |= {f"cuda:{gpu}": torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())}
    return peak


def _peak_of_process() -> int:
    """Return the peak of the process's resident memory in bytes."""
    try:
        import resource
    except ImportError:  # on Windows; psutil is a dependency of accelerate
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def bytes_of(module: nn.Module) -> int:
    """Return the memory of a module's parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
