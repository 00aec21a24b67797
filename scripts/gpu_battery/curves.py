"""Stages that measure without trained models: step times of random models, the losses, and FSDP2 on one device."""

from __future__ import annotations

import functools
import itertools
import time
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmark_loss import Variant, measure
from decode.bench.losslessness.verify import tie_bound
from decode.bench.methods import Method, medusa_method, plain_method
from decode.compiled.region import Regions
from decode.settings import Settings
from measuring import peak_meter
from medusa import Tree
from medusa.tree import load_tree
from scripts.gpu_battery.run import Figure, Run
from scripts.gpu_battery.steps import SKIPPED, profile_steps, step_ms
from tiny_models import random_heads
from train.build import blocks

NUM_HEADS = 4


def curves(run: Run, model: str) -> None:
    """Measure the time of a step over n nodes, T(n), by context and batch size.

    The steps are those of decoding, at as many lengths of text. The heads are random, so a step accepts about one
    token. The most important points, early ones of early ways, come first."""
    ranked = itertools.product(enumerate(run.ways.items()), enumerate(run.scale.points))
    for (_, (how, way)), (_, point) in sorted(ranked, key=lambda pair: pair[0][0] + pair[1][0]):
        settings, prepared = Settings(max_new_tokens=SKIPPED + run.scale.steps, ignore_eos=True, **way), []
        for nodes in point["nodes"]:
            about = {"model": model, "how": how, **point, "nodes": nodes}
            if run.end - time.monotonic() > run.seconds / 8:
                with run.attempt(**about):
                    method, start = random_method(run, random_model(run, model), nodes, settings), time.monotonic()
                    method(random_ids(run, about))
                    prepared.append((about | {"first_seconds": round(time.monotonic() - start, 1)}, method))
        for about, method in prepared:  # after all have compiled, so that little time lies between T(n) and T(1)
            with run.attempt(**about):
                measure_point(run, about, method)


def random_ids(run: Run, about: Figure) -> list[list[int]]:
    """Make a batch of random prompts for a point of the curves."""
    return torch.randint(run.scale.curve_shape["vocab_size"], (about["batch"], about["context"])).tolist()


def measure_point(run: Run, about: Figure, method: Method) -> None:
    """Record the time of a step at one point of the curves, its memory, and what the profiler sees in it."""
    prompts = random_ids(run, about)
    with run.alone():
        peak = peak_meter(run.device)
        timed = {"ms": step_ms(method, prompts)} | run.clocks()
        timed["peak_mb"] = round(peak() / 1e6)
        seen = profile_steps(method, prompts, run.on_gpu)
    run.keep(**about, **timed, **seen)


def free(run: Run, model: LlamaForCausalLM) -> None:
    """Free the memory of compiled steps, which keep their caches on the model and their graphs in PyTorch."""
    Regions.of(model).clear()
    if run.on_gpu:
        torch.compiler.reset()
        torch.cuda.empty_cache()


@functools.cache
def random_model(run: Run, name: str, **changes: int) -> LlamaForCausalLM:
    """Make the random Llama with the number of KV heads that the scale gives to `name`. The model is cached.

    `changes` are other entries of its configuration."""
    shape = run.scale.curve_shape | {"num_key_value_heads": run.scale.kv_heads[name]}
    shape |= {"max_position_embeddings": 16_384, "bos_token_id": None, "eos_token_id": None} | changes
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=run.dtype).eval()
    run.keep(model=name, parameters=model.num_parameters(), dtype=run.dtype_name, **changes)
    return model


def random_method(run: Run, model: LlamaForCausalLM, nodes: int, settings: Settings) -> Method:
    """Make a method that decodes with random heads on a tree of `nodes` nodes; with one node, plainly."""
    if nodes == 1:
        return plain_method(model, settings)
    heads = random_heads(model, NUM_HEADS, std=0.02, block="mlp", lm_head="shared")
    return medusa_method(model, heads, settings, tree=tree_of(nodes))


def tree_of(nodes: int) -> Tree:
    """Make a tree of the first `nodes` nodes, level by level, of the paper's tree for Vicuna-7B."""
    paths = sorted(load_tree("mc_sim_7b_63", 5).clip(NUM_HEADS).rank_paths, key=lambda path: (len(path), path))
    return Tree.from_paths(paths[: nodes - 1])


def losses(run: Run) -> None:
    """Measure peak memory and time of the loss: plain, in chunks, and with Liger's kernels if they are installed."""
    backends = ["plain", "chunked", *(["liger"] if run.on_gpu and find_spec("liger_kernel") else [])]
    for positions, lm_head, backend in itertools.product(run.scale.loss_positions, ("shared", "own"), backends):
        about = {"backend": backend, "lm_head": lm_head, "positions": positions}
        with run.attempt(**about):
            variant = Variant(**about, objective="labels", **run.scale.losses, device=run.device)
            with run.alone():
                run.keep(**about, **measure(variant))
        if run.on_gpu:
            torch.cuda.empty_cache()


def sharding(run: Run) -> None:
    """Compare the logits of a model before and after FSDP2 shards it over one process.

    RuntimeError: they differ by more than rounding."""
    model = random_model(run, next(iter(run.scale.kv_heads))).requires_grad_(False)
    ids = torch.randint(run.scale.curve_shape["vocab_size"], (2, 64), device=run.device)
    with torch.no_grad():
        expected = model(ids).logits
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
    if difference > tie_bound(run.dtype, float(expected.abs().max())):
        raise RuntimeError(f"logits of the sharded model differ by {difference:g}")
