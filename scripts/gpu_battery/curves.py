"""Stages that measure without trained models: the times of steps of random models."""

from __future__ import annotations

import functools
import itertools
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decode.bench.methods import Method, medusa_method, plain_method
from decode.settings import Settings
from medusa import Tree
from medusa.heads.independent import MedusaHeads
from medusa.tree import load_tree
from scripts.gpu_battery.run import Figure, Run
from scripts.gpu_battery.steps import SKIPPED, profile_steps, step_ms, warm_up
from tiny_models import random_heads

NUM_HEADS = 4


def curves(run: Run, model: str) -> None:
    """Measure the time of a step over n nodes, T(n), by context and batch size.

    The steps are those of decoding, at as many lengths of text. The heads are random, so a step accepts about one
    token. All points of the first way come first. Points of one batch size share compiled steps."""
    for (how, way), point in itertools.product(run.ways.items(), run.scale.points[model]):
        settings, prepared = Settings(max_new_tokens=SKIPPED + run.scale.steps, ignore_eos=True, **way), []
        for nodes in point["nodes"]:
            about = {"model": model, "how": how, **point, "nodes": nodes}
            if run.end - time.monotonic() > run.seconds / 8 and not run.has_kept(**about):
                with run.attempt(**about):
                    method, start = random_method(run, random_model(run, model), nodes, settings), time.monotonic()
                    warm_up(method, [random_ids(run, about)])
                    prepared.append((about | {"first_seconds": round(time.monotonic() - start, 1)}, method))
        for about, method in prepared:  # after all have compiled, so that little time lies between T(n) and T(1)
            with run.attempt(**about):
                measure_point(run, about, method)


def random_ids(run: Run, about: Figure) -> list[list[int]]:
    """Make a batch of random prompts for a point of the curves."""
    return torch.randint(run.scale.shapes[about["model"]]["vocab_size"], (about["batch"], about["context"])).tolist()


def measure_point(run: Run, about: Figure, method: Method) -> None:
    """Record the times of a step and of reading the prompts at one point of the curves, and what the profiler sees.

    Also the memory on a GPU."""
    prompts = random_ids(run, about)
    run.forget_peak()
    timed = dict(zip(("ms", "prompt_ms"), step_ms(method, prompts), strict=True)) | run.clocks() | run.peak()
    seen = profile_steps(method, prompts, run.on_gpu)
    run.keep(**about, **timed, **seen)


@functools.cache
def random_model(run: Run, name: str, **changes: int) -> LlamaForCausalLM:
    """Make the random Llama of the shape that the scale gives to `name`. The model is cached.

    `changes` are other entries of its configuration."""
    others = {"max_position_embeddings": 16_384, "bos_token_id": None, "eos_token_id": None}
    shape = run.scale.shapes[name] | others | changes
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=run.dtype).eval()
    run.keep(model=name, parameters=model.num_parameters(), dtype=run.dtype_name, **changes)
    return model


def random_method(run: Run, model: LlamaForCausalLM, nodes: int, settings: Settings) -> Method:
    """Make a method that decodes with random heads on a tree of `nodes` nodes; with one node, plainly."""
    if nodes == 1:
        return plain_method(model, settings)
    return medusa_method(model, heads_of(model), settings, tree=tree_of(nodes))


@functools.cache  # compiled steps belong to the heads that they were made for
def heads_of(model: LlamaForCausalLM) -> MedusaHeads:
    """Make random heads for a model."""
    return random_heads(model, NUM_HEADS, std=0.02, block="mlp", lm_head="shared")


def tree_of(nodes: int) -> Tree:
    """Make a tree of the first `nodes` nodes, level by level, of the paper's tree for Vicuna-7B."""
    paths = sorted(load_tree("mc_sim_7b_63", 5).clip(NUM_HEADS).rank_paths, key=lambda path: (len(path), path))
    return Tree.from_paths(paths[: nodes - 1])
