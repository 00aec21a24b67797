"""Times of decoding steps and of forwards alone, and what a profiler sees in a step.

Shapes: B rows of the batch, N nodes of a tree."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from decode.compiled.fixed_cache import rounded, static
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from decode.bench.methods import Method
from decode.compiled.graphs import GraphedStep, possible
from decode.ops.fast_topk import most_probable
from decode.ops.grouped_attention import grouped
from medusa import Tree

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
        found["kernels"] = sum(e.count for e in kernels) / PROFILED
        found["kernels_ms"] = sum(e.self_device_time_total for e in kernels) / 1000 / PROFILED
    return found


class Placed(CacheLayerMixin):
    """One layer of a KV cache of fixed size, whose next keys and values go to the cache slots `slots` [N]."""

    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.slots, self.is_initialized = keys, values, slots, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise RuntimeError("the layer is made with its memory")

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **more: object) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, heads, N, head size], and return those of all slots."""
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0  # unused: positions and masks are given

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[2]

    get_max_length = get_max_cache_shape


@torch.inference_mode()
def forward_timer(model: LlamaForCausalLM, tree: Tree, rows: int, start: int, count: int) -> Callable[[], float]:
    """Compile a forward of the stock model over the nodes of `tree` for each of `rows` texts; return its timer.

    The timer returns T(n), the median in milliseconds of `count` forwards until the most probable tokens are on the
    host. The texts have `start` tokens, and one more after each forward. As in decoding, attention is `grouped` and
    reads a window of the cache (`rounded`), and on a GPU the forward is a CUDA graph of our own."""
    config, device, nodes = model.config, model.device, tree.num_nodes
    capacity = rounded(start + count + nodes)
    shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
    slots = static(torch.arange(nodes, device=device))
    states = [
        [static(torch.randn(shape, dtype=model.dtype, device=device)) for _ in range(2)] for _ in model.model.layers
    ]
    cache = Cache(layers=[Placed(keys, values, slots) for keys, values in states])
    column, depth, ancestors = torch.arange(capacity, device=device), tree.depth.to(device), tree.ancestors.to(device)
    ids = torch.zeros(rows, nodes, dtype=torch.long, device=device)

    def forward() -> Tensor:
        node = column - slots[0]
        seen = (node < 0) | ((node < nodes) & ancestors[:, node.clamp(0, nodes - 1)])
        mask = torch.where(seen, 0.0, torch.finfo(model.dtype).min).to(model.dtype).expand(rows, 1, -1, -1)
        positions = (slots[0] + depth).expand(rows, -1)
        out = model(ids, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True)
        return most_probable(out.logits)

    compiled = torch.compile(forward, fullgraph=True, dynamic=False)
    graphed = GraphedStep(compiled, device) if possible(device) else None

    def seconds_at(length: int) -> float:
        slots.copy_(torch.arange(length, length + nodes))
        begin = time.perf_counter()
        with grouped(config):
            found = compiled() if graphed is None else graphed(capacity)
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
