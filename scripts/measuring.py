"""What the scripts that measure share: models with their prompts, methods that take turns, and peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from decode.bench.benchmark import Contender, run_rounds
from decode.bench.machine import stopwatch
from decode.bench.methods import Method
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.commands.arguments import group
from medusa.commands.models import open_models
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts
from medusa.loading import Loaded
from medusa.options import count


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(CommandOptions):
    """Options of the scripts that measure: greedy decoding of prompts, one at a time, that goes on after EOS."""

    models: Models = group(Models, "models", only=("backbone",))
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(Settings, "generation", only=("max_new_tokens",), max_new_tokens=128, ignore_eos=True)
    batch_size: int = 1
    contrasting: Contrasting = NO_CONTRAST
    rounds: int = count(3, "decode all prompts N times")


class Measured(NamedTuple):
    """A backbone and the prompts that it is measured on."""

    loaded: Loaded
    prompts: list[list[int]]
    categories: list[str | None]
    """One for each prompt."""


def open_measured(options: MeasuringOptions) -> Measured:
    """Load the backbone and the prompts; raise RequestError for a backbone that cannot verify a tree."""
    records = options.prompts.read()
    loaded, _, prompts, _ = open_models(options, records)
    require_tree_forward(loaded.model)
    return Measured(loaded, prompts, [record.category for record in records])


def take_turns(
    options: MeasuringOptions, loaded: Loaded, methods: dict[str, Method], batches: Sequence[list[list[int]]]
) -> dict[str, Contender]:
    """Decode the batches by all methods, which take turns; on one CPU thread, its CPU time is counted."""
    contenders = {name: Contender(name, method) for name, method in methods.items()}
    with options.output.progress_bars() as start_progress:
        advance = start_progress("measuring", options.rounds * len(batches))
        clock = stopwatch(loaded.model.device)
        run_rounds(list(contenders.values()), batches, options.rounds, advance, options.runtime.seed, clock)
    return contenders


def show(options: MeasuringOptions, *parts: str) -> None:
    """Print titles and Markdown tables as they are, unless `--quiet` was given."""
    options.output.console.print("\n\n".join(parts), markup=False, highlight=False, soft_wrap=True)


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
