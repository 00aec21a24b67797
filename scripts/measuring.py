"""Helpers of the scripts that measure: options, models with their prompts, timing in turns, and peak memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from decode.bench.benchmark import Contender, run_rounds, summarize
from decode.bench.figures import MethodFigures
from decode.bench.machine import stopwatch
from decode.bench.methods import Method
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.commands.models import open_models
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts
from medusa.loading import Loaded
from medusa.options import count, group

GENERATION = {"max_new_tokens": 128, "ignore_eos": True}  # defaults of what is generated


class MeasuringOptions(CommandOptions):
    """Options of the scripts that measure: greedy decoding of one prompt at a time, which continues after EOS."""

    models: Models = group(Models, "models", only=("backbone",))
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(Settings, "generation", only=("max_new_tokens",), **GENERATION)
    batch_size: int = 1
    contrasting: Contrasting = NO_CONTRAST
    rounds: int = count(3, "decode all prompts N times")


class Measured(NamedTuple):
    """A backbone with the prompts that it decodes, and the category of each prompt."""

    loaded: Loaded
    prompts: list[list[int]]
    categories: list[str | None]


def open_measured(options: MeasuringOptions) -> Measured:
    """Load the backbone and the prompts; raise RequestError if the backbone cannot verify a tree."""
    records = options.prompts.read()
    opened = open_models(options, records)
    require_tree_forward(opened.loaded.model)
    return Measured(opened.loaded, opened.prompts, [record.category for record in records])


def take_turns(options: MeasuringOptions, measured: Measured, methods: dict[str, Method]) -> dict[str, MethodFigures]:
    """Decode all prompts with all methods, which take turns, and return the figures of each method.

    The first of the methods must be `plain`, plain decoding. With one CPU thread, CPU time is measured, else wall time.
    """
    contenders, batches = [Contender(*named) for named in methods.items()], [[ids] for ids in measured.prompts]
    with options.output.progress_bars() as start_progress:
        advance = start_progress("measuring", options.rounds * len(batches))
        clock = stopwatch(measured.loaded.model.device)
        run_rounds(contenders, batches, options.rounds, advance, options.runtime.seed, clock)
    if "transformers" not in methods:  # `summarize` needs it; without it, no speedup over `generate` is of interest
        contenders.append(replace(contenders[0], name="transformers"))
    return summarize(contenders, measured.categories)


def show(options: MeasuringOptions, *parts: str) -> None:
    """Print titles and Markdown tables without markup, unless `--quiet` was given."""
    options.output.console.print("\n\n".join(parts), markup=False, highlight=False, soft_wrap=True)


class PeakMemory:
    """Measures peak memory from its creation on: tensors on a GPU, resident memory on a CPU (Linux only)."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
            self.before = _resident("VmRSS")

    def grown(self) -> int:
        """Return the peak of the memory in use since the creation of this object, less the memory in use then."""
        return (torch.cuda.max_memory_allocated() if self.on_gpu else _resident("VmHWM")) - self.before


def _resident(field: str) -> int:
    """Read a memory figure from /proc/self/status, in bytes; `field` is VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
