"""Memory of a module's parameters, and peak memory of the process and its GPUs."""

from __future__ import annotations

import sys

import torch
from torch import nn


def peak_memory() -> dict[str, int]:
    """Peak memory in bytes: of the `process` in main memory, and of tensors on each GPU as `cuda:0` and so on."""
    peak = {"process": _peak_of_process()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        peak |= {f"cuda:{gpu}": torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())}
    return peak


def _peak_of_process() -> int:
    try:
        import resource
    except ImportError:  # Windows; psutil comes with accelerate
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux counts in KiB


def bytes_of(module: nn.Module) -> int:
    """Memory of a module's parameters in bytes."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
