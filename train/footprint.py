"""What a run takes: memory at its peak, and bytes on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from medusa.heads.independent import MedusaHeads
from train.resume import checkpoints


def footprint(heads: MedusaHeads, output_dir: str | Path) -> dict[str, Any]:
    """Peak memory of the process (and of each GPU), bytes of the heads, and of a checkpoint with its optimiser state.

    Nothing here holds the backbone but the peak memory: checkpoints are about three times the heads (their weights
    and AdamW's two moments).
    """
    saved = checkpoints(output_dir)
    return {
        "peak_memory_bytes": peak_memory(),
        "heads_bytes": sum(parameter.numel() * parameter.element_size() for parameter in heads.parameters()),
        "checkpoint_bytes": size_on_disk(saved[-1]) if saved else None,
    }


def peak_memory() -> dict[str, int]:
    """Bytes: `process` is the most main memory that this process ever held, `cuda:0`, ... what tensors took there."""
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


def size_on_disk(folder: Path) -> int:
    """Bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
