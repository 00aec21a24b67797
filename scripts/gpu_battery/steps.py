"""Times of decoding steps and of forwards alone, and what a profiler sees in a step.

Shapes: B rows of the batch, N nodes of a tree."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import LlamaForCausalLM

from decode.bench.benchmark import captures_graphs
from decode.bench.methods import Method
from decode.cache import TreeCache
from decode.compiled.graphs import GraphedStep, possible
from decode.compiled.region import keep_in_place
from decode.draft import Draft
from decode.ops.attention import grouped
from decode.ops.fast_topk import most_probable
from decode.reader import Reader
from decode.topology import Topology
from medusa import Tree
from medusa.backbone import Backbone

SKIPPED = 4  # steps before those that are timed: they compile, warm up and capture
PROFILED = 4  # steps
TEXTS = 3  # of which the median start counts
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ATTENTION = ("attention", "fmha", "flash", "cudnn", "sdpa")  # parts of the names of attention kernels


class StepClock:
    """Receives the tokens of decoding steps (`on_step` of a method), and notes when each step ended on the host."""

    def __init__(self) -> None:
        self.texts: list[list[float]] = []
        self.begun: list[float] = []

    def start(self) -> Callable[[int, list[int]], None]:
        """Return the `on_step` of a new text (or batch of texts, whose first row is timed)."""
        ends: list[float] = []
        self.texts.append(ends)
        self.begun.append(time.perf_counter())
        return lambda row, ids: ends.append(time.perf_counter()) if row == 0 else None

    @property
    def ms(self) -> float | None:
        """The median time in milliseconds from the end of one step to the end of the next; `None` without steps.

        The text grows with each step, so this covers as many lengths as there were steps."""
        gaps = [b - a for ends in self.texts for a, b in itertools.pairwise(ends[SKIPPED - 1 :])]
        return 1000 * statistics.median(gaps) if gaps else None

    @property
    def first_ms(self) -> float | None:
        """The median time in milliseconds until the first step ended, which wrote the first token; `None` without."""
        starts = [ends[0] - begun for begun, ends in zip(self.begun, self.texts, strict=True) if ends]
        return 1000 * statistics.median(starts) if starts else None

    @property
    def prompt_ms(self) -> float | None:
        """The median time in milliseconds until the first step ended, less that of a step; `None` without steps."""
        return None if self.first_ms is None or self.ms is None else self.first_ms - self.ms


def warm_up(method: Method, batches: Sequence[Sequence[Sequence[int]]]) -> None:
    """Decode the batches of prompts, and capture the graphs that start a text, which happens at its third use."""
    for batch in batches:
        method(batch)
    for batch in 2 * batches if captures_graphs(method) else ():
        list(itertools.islice(method.start(batch), 1))


def step_ms(method: Method, prompts: Sequence[Sequence[int]]) -> tuple[float | None, float | None]:
    """Decode the prompts `TEXTS` times; return the milliseconds of a step (the median), and of reading the prompts."""
    clock = StepClock()
    for _ in range(TEXTS):
        method(prompts, clock.start())
    return clock.ms, clock.prompt_ms


def profile_steps(
    method: Method, prompts: Sequence[Sequence[int]], on_gpu: bool, trace: Path | None = None
) -> dict[str, object]:
    """Count a step's kernel launches (operations on a CPU) and waits for the device; name its longest attention kernel.

    On a GPU, also add up how long its kernels ran. `trace`: write the profile to this file (for chrome://tracing)."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    plan = schedule(wait=SKIPPED - 1, warmup=1, active=PROFILED, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        method(prompts, lambda row, ids: profiler.step() if row == 0 else None)
    if profiler.step_num < SKIPPED + PROFILED:
        return {}  # the text ended before enough steps
    if trace is not None:
        trace.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    events = profiler.key_averages()
    # The GPU's own events, in which the steps that the profiler marks would count their kernels again.
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.key.startswith("ProfilerStep")]
    launches = sum(e.count for e in events if e.key in LAUNCHES or (not on_gpu and "aten::" in e.key))
    waits = sum(e.count for e in events if e.key in WAITS)
    attention = [e for e in (kernels if on_gpu else events) if any(part in e.key.lower() for part in ATTENTION)]
    longest = max(attention, key=lambda e: (e.self_device_time_total, e.self_cpu_time_total), default=None)
    found = {"launches": launches / PROFILED, "waits": waits / PROFILED, "attention": longest and longest.key[:60]}
    if on_gpu:
        found["kernels"] = sum(e.count for e in kernels) / PROFILED
        found["kernels_ms"] = sum(e.self_device_time_total for e in kernels) / 1000 / PROFILED
    return found


@torch.inference_mode()
def forward_timer(model: LlamaForCausalLM, tree: Tree, rows: int, start: int, count: int) -> Callable[[], float]:
    """Compile a forward of the model alone over the nodes of `tree` for each of `rows` texts; return its timer.

    The timer returns T(n), the median in milliseconds of `count` forwards until the most probable tokens are on the
    host. The texts have `start` tokens, and one more after each forward. Cache, masks and attention are those of
    compiled decoding, and on a GPU the forward is a CUDA graph of our own."""
    device, nodes = model.device, tree.num_nodes
    cache = TreeCache(model.config, rows, start + count + nodes, device, fixed=True)
    reader = Reader(Backbone(model), cache)
    reader.prefill(torch.zeros(rows, start, dtype=torch.long, device=device), [start] * rows)
    cache.for_steps(compiled=True)
    cache.open(count + nodes)
    keep_in_place(cache)
    draft = Draft(torch.zeros(rows, nodes, dtype=torch.long, device=device), Topology.of(tree.to(device)))
    nothing = torch.zeros(rows, dtype=torch.long, device=device)

    def forward() -> Tensor:
        readout = reader.read(draft)
        cache.commit(None, nothing)
        return most_probable(readout.logits)

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)
    graphed = GraphedStep(lambda window: compiled(), device) if possible(device) else None

    def seconds_at(length: int) -> float:
        cache.filled.fill_(length)
        begin = time.perf_counter()
        with grouped(model.config):
            found = compiled() if graphed is None else graphed(cache.width)
            found.tolist()
        return time.perf_counter() - begin

    @torch.inference_mode()
    def milliseconds() -> float:
        return 1000 * statistics.median(seconds_at(start + number) for number in range(count))

    for _ in range(SKIPPED):  # the first forward compiles, and the second one is captured
        seconds_at(start)
    return milliseconds


def target_of(tau: float, forward_of_one: float, forward: float) -> float:
    """Compute the speedup to reach over compiled plain decoding: 0.9 tau T(1) / T(n), for T in milliseconds.

    A step without heads, acceptance and compaction would reach tau T(1) / T(n); a tenth is allowed for them."""
    return 0.9 * tau * forward_of_one / forward
