"""What a run takes: memory at its peak, and bytes on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa.heads.independent import MedusaHeads
from medusa.memory import peak_memory
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


def size_on_disk(folder: Path) -> int:
    """Bytes of all files in `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
