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

from decode.bench.methods import Method
from decode.compiled.fixed_cache import FixedCache
from decode.compiled.region import Region
from decode.draft import Draft, Frontier
from decode.masks import visible_slots
from decode.ops.fast_topk import most_probable
from decode.topology import Topology
from medusa import Tree
from medusa.tree_support import additive

SKIPPED = 4  # steps before those that are timed: they compile, warm up and capture
PROFILED = 4  # steps
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
ATTENTION = ("attention", "fmha", "flash", "cudnn", "sdpa")  # parts of the names of attention kernels


class StepClock:
    """Receives the tokens of decoding steps (`on_step` of a method), and notes when each step ended on the host."""

    def __init__(self) -> None:
        self.texts: list[list[float]] = []

    def start(self) -> Callable[[int, list[int]], None]:
        """Return the `on_step` of a new text (or batch of texts, whose first row is timed)."""
        ends: list[float] = []
        self.texts.append(ends)
        return lambda row, ids: ends.append(time.perf_counter()) if row == 0 else None

    @property
    def ms(self) -> float | None:
        """The median time in milliseconds from the end of one step to the end of the next; `None` without steps.

        The text grows with each step, so this covers as many lengths as there were steps."""
        gaps = [b - a for ends in self.texts for a, b in itertools.pairwise(ends[SKIPPED - 1 :])]
        return 1000 * statistics.median(gaps) if gaps else None


def step_ms(method: Method, prompts: Sequence[Sequence[int]]) -> float | None:
    """Decode the prompts, and return the median time of a step in milliseconds."""
    clock = StepClock()
    method(prompts, clock.start())
    return clock.ms


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
        found["kernels_ms"] = sum(e.self_device_time_total for e in kernels) / 1000 / PROFILED
    return found


class Repeated:
    """A drafter whose draft holds the root at every node of a tree, so that only the shape of the tree counts."""

    def __init__(self, tree: Tree, device: torch.device) -> None:
        self.topology = Topology.of(tree.to(device))

    def propose(self, frontier: Frontier) -> Draft:
        return Draft(frontier.root[:, None].expand(-1, self.topology.num_nodes), self.topology)


class Forwards(Region):
    """A compiled region that only runs the backbone over the nodes of a tree: no heads, acceptance or compaction.

    Each call adds one token to the texts. All else is as in the region of a decoding step: cache, masks, attention."""

    def __init__(self, like: Region, tree: Tree) -> None:
        """Make a region with the batch size, the capacity and the texts of the region `like`."""
        drafter = Repeated(tree, like.backbone.device)
        super().__init__(
            like.backbone, FixedCache(like.cache, like.cache.capacity), None, drafter, like.sampler, like.hidden
        )
        self.load(like.cache, None, like.frontier(), [True] * like.cache.rows)

    def _step(self, u: Tensor) -> Tensor:
        cache, draft = self.cache, self.drafter.propose(self.frontier())
        topology, lengths = draft.topology, cache.lengths
        positions = lengths[:, None] + topology.depth
        cache.append_next(topology.num_nodes)
        masks = self.layers.masks(
            lambda kind: additive(visible_slots(topology, lengths, cache.capacity, kind), self.backbone.dtype)[:, None]
        )
        readout = self.backbone.forward(draft.ids, cache, position_ids=positions, attention_mask=masks)
        lengths.add_(1)
        return most_probable(readout.logits)


@torch.inference_mode()
def forward_ms(like: Region, tree: Tree, start: int, count: int) -> float:
    """Time one compiled forward over the nodes of `tree`, as in the decoding step of the region `like`: T(n).

    The texts have `start` tokens, and one more after each of `count` forwards; the result is the median in milliseconds
    until the most probable tokens are on the host."""
    forwards = Forwards(like, tree)
    forwards.cache.lengths.fill_(start)
    u, times = torch.zeros(forwards.cache.rows, 1, dtype=torch.float64, device=forwards.root.device), []
    for _ in range(SKIPPED + count):
        begin = time.perf_counter()
        forwards(u)
        times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times[SKIPPED:])


def target_of(tau: float, forward_of_one: float, forward: float) -> float:
    """Compute the speedup to reach over compiled plain decoding: 0.9 tau T(1) / T(n), for T in milliseconds.

    A step without heads, acceptance and compaction would reach tau T(1) / T(n); a tenth is allowed for them."""
    return 0.9 * tau * forward_of_one / forward
