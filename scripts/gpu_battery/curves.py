"""Stages of the first call: step times T(n) of random models, the losses, and FSDP2 on one device."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmark_loss import Variant, measure
from decode.bench.methods import Method, medusa_method, plain_method
from decode.compiled.region import Regions
from decode.settings import Settings
from medusa import Tree
from medusa.tree import load_tree
from scripts.gpu_battery.run import Run
from tiny_models import random_heads
from train.build import blocks

SKIPPED = 4  # steps before those that are timed
PROFILED = 4  # steps
NUM_HEADS = 4
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
ATTENTION = ("attention", "fmha", "flash", "cudnn", "sdpa")  # parts of the names of attention kernels


def curves(run: Run) -> None:
    """Measure T(n), the time of a step over n nodes, by context, batch size, attention (GQA, MHA), compiled and eager.

    The heads are random, so a step accepts about one token."""
    scale = run.scale
    for how, context, batch in itertools.product(("compiled", "eager"), scale.contexts, scale.batches):
        for model, nodes in itertools.product(scale.kv_heads, scale.nodes):
            if how == "compiled" and run.end - time.monotonic() < run.seconds / 3:
                continue  # the eager figures need the rest of the time
            about = {"model": model, "how": how, "context": context, "batch": batch, "nodes": nodes}
            with run.attempt(**about):
                settings = Settings(max_new_tokens=SKIPPED + scale.steps, ignore_eos=True, compile=how == "compiled")
                backbone = random_model(run, model)
                method = plain_method(backbone, settings)
                if nodes > 1:
                    heads = random_heads(backbone, NUM_HEADS, std=0.02, block="mlp", lm_head="shared")
                    method = medusa_method(backbone, heads, settings, tree=tree_of(nodes))
                prompts = torch.randint(scale.curve_shape["vocab_size"], (batch, context)).tolist()
                start = time.monotonic()
                method(prompts)
                about["first_seconds"] = round(time.monotonic() - start, 1)
                run.keep(**about, ms=step_ms(method, prompts), **profile_steps(run, method, prompts))
            Regions.of(random_model(run, model)).clear()  # compiled steps keep caches on the model
            if run.on_gpu:
                torch.cuda.empty_cache()


@functools.cache
def random_model(run: Run, name: str) -> LlamaForCausalLM:
    """Make the random Llama with the number of KV heads that the scale gives to `name`. The model is cached."""
    shape = run.scale.curve_shape | {"num_key_value_heads": run.scale.kv_heads[name]}
    config = LlamaConfig(**shape, max_position_embeddings=16_384, bos_token_id=None, eos_token_id=None)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(config, dtype=run.dtype).eval()
    run.keep(model=name, parameters=model.num_parameters(), dtype=run.dtype_name)
    return model


def tree_of(nodes: int) -> Tree:
    """Make a tree of the first `nodes` nodes, level by level, of the paper's tree for Vicuna-7B."""
    paths = sorted(load_tree("mc_sim_7b_63", 5).clip(NUM_HEADS).rank_paths, key=lambda path: (len(path), path))
    return Tree.from_paths(paths[: nodes - 1])


def step_ms(method: Method, prompts: Sequence[Sequence[int]]) -> float:
    """Return the median time of a step in milliseconds. A step ends when its tokens are on the host."""
    times: list[float] = []
    method(prompts, lambda row, ids: times.append(time.perf_counter()) if row == 0 else None)
    return 1000 * statistics.median(b - a for a, b in itertools.pairwise(times[SKIPPED - 1 :]))


def profile_steps(run: Run, method: Method, prompts: Sequence[Sequence[int]]) -> dict[str, object]:
    """Count a step's kernel launches (operations on a CPU) and synchronizations; name its longest attention kernel."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if run.on_gpu else [])]
    plan = schedule(wait=SKIPPED, warmup=0, active=PROFILED, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        method(prompts, lambda row, ids: profiler.step() if row == 0 else None)
    if profiler.step_num < SKIPPED + PROFILED:
        return {}  # the text ended before enough steps
    events = profiler.key_averages()
    launches = sum(e.count for e in events if e.key in LAUNCHES or (not run.on_gpu and "aten::" in e.key))
    waits = sum(e.count for e in events if e.key in WAITS)
    kernels = [e for e in events if any(part in e.key.lower() for part in ATTENTION)]
    longest = max(kernels, key=lambda e: (e.self_device_time_total, e.self_cpu_time_total), default=None)
    return {"launches": launches / PROFILED, "waits": waits / PROFILED, "attention": longest and longest.key[:60]}


def losses(run: Run) -> None:
    """Measure peak memory and time of the loss: plain, in chunks, and with Liger's kernels if they are installed."""
    backends = ["plain", "chunked", *(["liger"] if run.on_gpu and find_spec("liger_kernel") else [])]
    for positions, lm_head, backend in itertools.product(run.scale.loss_positions, ("shared", "own"), backends):
        about = {"backend": backend, "lm_head": lm_head, "positions": positions}
        with run.attempt(**about):
            variant = Variant(**about, objective="labels", **run.scale.losses, device=run.device)
            run.keep(**about, **measure(variant))


def sharding(run: Run) -> None:
    """Compare the logits of a model before and after FSDP2 shards it over one process."""
    model = random_model(run, next(iter(run.scale.kv_heads))).requires_grad_(False)
    ids = torch.randint(run.scale.curve_shape["vocab_size"], (2, 64), device=run.device)
    with torch.no_grad():
        expected = model(ids).logits
    if run.on_gpu:
        torch.cuda.set_device(torch.device(run.device).index or 0)
    dist.init_process_group("nccl" if run.on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, sharded = init_device_mesh(torch.device(run.device).type, (1,)), blocks(model)
        for block in sharded:
            fully_shard(block, mesh=mesh)
        with torch.no_grad():
            difference = float((model(ids).logits - expected).abs().max())
    finally:
        dist.destroy_process_group()
    run.keep(blocks=len(sharded), largest_difference=difference)
    if difference:
        raise RuntimeError(f"logits of the sharded model differ by {difference:g}")
