"""Helpers of the scripts that measure: options, models with their prompts, timing in turns, and peak memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from decode.bench.benchmark import Contender, run_rounds, summarize
from decode.bench.figures import MethodFigures
from decode.bench.machine import stopwatch
from decode.bench.methods import Method
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.commands.models import Opened, open_models
from medusa.commands.options import NO_CONTRAST, CommandOptions, Contrasting, Models, Prompts
from medusa.options import REQUIRED, count, group

GENERATION = {"max_new_tokens": 128, "ignore_eos": True}  # defaults of what is generated


class MeasuringOptions(CommandOptions):
    """Options of the scripts that measure: greedy decoding, by default of one prompt at a time, continued after EOS."""

    by_position = ()

    models: Models = group(Models, "models", only=("backbone",), backbone=REQUIRED)
    prompts: Prompts = group(Prompts, "prompts")
    settings: Settings = group(Settings, "generation", only=("max_new_tokens",), **GENERATION)
    batch_size: int = 1
    contrasting: Contrasting = NO_CONTRAST
    rounds: int = count(3, "decode all prompts N times")


def open_measured(options: MeasuringOptions) -> Opened:
    """Load the backbone and the prompts; raise RequestError if the backbone cannot verify a tree."""
    opened = open_models(options, options.prompts.read())
    require_tree_forward(opened.loaded.model)
    return opened


def take_turns(options: MeasuringOptions, opened: Opened, methods: dict[str, Method]) -> dict[str, MethodFigures]:
    """Decode all prompts with all methods, which take turns, and return the figures of each method.

    The first method must be `plain`, plain decoding. With one CPU thread, CPU time is measured, else wall time."""
    contenders, size = [Contender(*named) for named in methods.items()], options.batch_size
    batches = [opened.prompts[start : start + size] for start in range(0, len(opened.prompts), size)]
    with options.output.progress_bars() as start_progress:
        advance = start_progress("measuring", options.rounds * len(batches))
        clock = stopwatch(opened.loaded.model.device)
        run_rounds(contenders, batches, options.rounds, advance, options.runtime.seed, clock)
    if "transformers" not in methods:  # `summarize` needs it; without it, no speedup over `generate` is of interest
        contenders.append(replace(contenders[0], name="transformers"))
    return summarize(contenders, [record.category for record in options.prompts.read()])


def without_folder(place: str) -> str:
    """Return the last part of a local folder, because results name no folders of a machine; other names stay."""
    return Path(place).resolve().name if Path(place).is_dir() else place


def show(options: MeasuringOptions, *parts: str) -> None:
    """Print titles and Markdown tables without markup, unless `--quiet` was given."""
    options.output.console.print("\n\n".join(parts), markup=False, highlight=False, soft_wrap=True)


def peak_meter(device: torch.device | str) -> Callable[[], int]:
    """Return a meter of peak memory since now, in bytes: tensors on a GPU, resident memory on a CPU (Linux only)."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        return lambda: torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
    before = _resident("VmRSS")
    return lambda: _resident("VmHWM") - before


def _resident(field: str) -> int:
    """Read a memory figure from /proc/self/status, in bytes; `field` is VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))
