"""What the scripts that measure share: models with their prompts, methods that take turns, and peak memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from decode.bench.benchmark import Contender, run_rounds
from decode.bench.machine import stopwatch
from decode.bench.methods import Method
from decode.tree_check import require_tree_forward
from medusa.commands import common
from medusa.loading import Loaded
from medusa.records.record import prompt_ids


class Models(NamedTuple):
    """A backbone and the prompts that it is measured on."""

    loaded: Loaded
    prompts: list[list[int]]
    categories: list[str | None]
    """One for each prompt."""


def open_models(args: argparse.Namespace) -> Models:
    """Load the backbone and the prompts that the command line names; refuse a backbone that holds no tree."""
    common.prepare_machine(args)
    loaded = common.open_backbone(args)
    require_tree_forward(loaded.model)
    records = common.read_prompts(args)
    prompts = [prompt_ids(record, loaded.tokenizer) for record in records]
    return Models(loaded, prompts, [record.category for record in records])


def take_turns(
    args: argparse.Namespace,
    loaded: Loaded,
    methods: dict[str, Method],
    batches: Sequence[list[list[int]]],
    rounds: int,
) -> dict[str, Contender]:
    """Decode the batches by all methods, which take turns; on one CPU thread, its CPU time is counted."""
    contenders = {name: Contender(name, method) for name, method in methods.items()}
    with common.progress_bars(args) as start_progress:
        advance = start_progress("measuring", rounds * len(batches))
        clock = stopwatch(loaded.model.device)
        run_rounds(list(contenders.values()), batches, rounds, advance, args.seed, clock)
    return contenders


class PeakMemory:
    """The most bytes in use since this object was made: tensors on a GPU, resident memory on a CPU (Linux only)."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
            self.before = _resident("VmRSS")

    def grown(self) -> int:
        """Bytes by which memory in use rose at most."""
        return (torch.cuda.max_memory_allocated() if self.on_gpu else _resident("VmHWM")) - self.before


def _resident(field: str) -> int:
    """Bytes that the kernel counts under this name in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
