"""The stage `checks`: what only a GPU can show of the faults in docs/log.md."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from decode.bench.losslessness.verify import compare_greedy
from decode.bench.methods import plain_method
from decode.settings import Settings
from measuring import peak_meter
from scripts.gpu_battery.curves import free, random_method, random_model
from scripts.gpu_battery.run import Run
from scripts.gpu_battery.steps import SKIPPED, profile_steps, step_ms

LAYERS = {"num_hidden_layers": 2}  # of most models: a fault does not need more, and each layer takes time to compile
ROW_ENDS = 8  # tokens from the end of one row to the end of the next, in the batch whose rows end one by one
MOST_GROWTH = 0.75  # of the cache: a copy of the 15 rows that are left when the first of 16 ends takes 0.94
SMALLEST_SEEN = 10**8  # bytes of a cache that outweighs the other memory of a step
CHOOSING = {  # ways to choose tokens, whose waits for the GPU are counted
    "greedy": Settings(),
    "sampled": Settings(temperature=1.0),
    "sampled, drawn draft": Settings(temperature=1.0, draft="sample"),
    "typical": Settings(temperature=0.7, acceptance="typical"),
}


def checks(run: Run) -> None:
    """Check compiled steps in other threads, memory while rows end, waits, masks at any offset, and cuDNN's attention.

    A wrong address ends the process, so the checks that may meet one come last."""
    for check in (other_threads, ending_rows, waits, mask_offsets, cudnn):
        with run.attempt(check=check.__name__):
            check(run, partial(run.keep, check=check.__name__))
    run.require_no_errors()


Keep = Callable[..., None]  # records a figure of a check


def other_threads(run: Run, keep: Keep) -> None:
    """Compiled steps must give the same text in the thread that compiled them and in another one."""
    model, prompts = random_model(run, "MHA", **LAYERS), random_prompts(run, [run.scale.check_context])
    for (how, way), compiled_here in itertools.product(run.ways.items(), (True, False)):
        settings = replace(settings_of(run), **way)
        if settings.compile:
            with run.attempt(check="other_threads", how=how, compiled_here=compiled_here):
                method, texts = random_method(run, model, run.scale.check_nodes, settings), []
                with ThreadPoolExecutor(1) as other:
                    for here in (compiled_here, not compiled_here, compiled_here):
                        results = method(prompts) if here else other.submit(method, prompts).result()
                        texts.append(results[0].new_ids)
                keep(how=how, compiled_here=compiled_here, equal=texts[0] == texts[1] == texts[2])
                if not texts[0] == texts[1] == texts[2]:
                    raise RuntimeError(f"{how} steps give another text in another thread")
            free(run, model)


def ending_rows(run: Run, keep: Keep) -> None:
    """While the rows of a batch end one after another, memory must not grow by a copy of the KV cache."""
    rows, context = run.scale.check_rows, run.scale.check_context + ROW_ENDS * run.scale.check_rows
    model = random_model(run, "MHA", max_position_embeddings=context)  # a row ends where the context ends
    prompts = random_prompts(run, [context - ROW_ENDS * (row + 1) for row in range(rows)])
    keys = rows * context * model.config.num_hidden_layers * model.config.num_key_value_heads
    cache = 2 * keys * model.config.head_dim * run.dtype.itemsize
    for nodes in (1, run.scale.check_nodes):
        method = random_method(run, model, nodes, replace(settings_of(run), max_new_tokens=ROW_ENDS * rows))
        growth = Growth(run.device)
        results = method(prompts, growth.on_step)
        if len({len(result.new_ids) for result in results}) != rows:
            raise RuntimeError("rows were to end one after another")
        share = growth.peak() / cache
        keep(nodes=nodes, rows=rows, cache_mb=round(cache / 1e6, 3), growth=share)
        if cache > SMALLEST_SEEN and share > MOST_GROWTH:  # other memory of a step hides the cache of a toy
            raise RuntimeError(f"while rows end, steps of {nodes} nodes need {share:.2f} of the KV cache again")


class Growth:
    """Measures by how many bytes memory grows after the first step of a text, when the prompts have been read."""

    def __init__(self, device: str) -> None:
        self.device, self.peak = device, None

    def on_step(self, row: int, ids: list[int]) -> None:
        self.peak = self.peak or peak_meter(self.device)


def waits(run: Run, keep: Keep) -> None:
    """Count how often an eager step waits for the GPU, by the way that tokens are chosen and by batch size."""
    model = random_model(run, "GQA", **LAYERS)
    for (name, settings), rows in itertools.product(CHOOSING.items(), (1, 4)):
        prompts, asked = random_prompts(run, [run.scale.check_context] * rows), vars(settings_of(run))
        settings = replace(settings, **{name: asked[name] for name in ("max_new_tokens", "ignore_eos")})
        method = random_method(run, model, run.scale.check_nodes, settings)
        keep(tokens=name, batch=rows, **profile_steps(method, prompts, run.on_gpu))


def mask_offsets(run: Run, keep: Keep) -> None:
    """Greedy texts must equal plain decoding, up to rounding, for 128 prompt lengths in a row.

    Without grouped queries, masks reach the attention kernel as they are, so this model is the one to fail."""
    for name in ("GQA", "MHA"):
        model, settings = random_model(run, name, **LAYERS), settings_of(run)
        prompts = random_prompts(run, range(33, 33 + run.scale.check_lengths))
        drafted = random_method(run, model, run.scale.check_nodes, settings)
        found = compare_greedy(model, plain_method(model, settings), drafted, prompts)
        keep(model=name, equal_texts=f"{found.equal} of {found.prompts}", rounding_ties=found.ties)
        if not found.passed:
            raise RuntimeError(f"{name}: {found.in_words(run.dtype_name)}")


def cudnn(run: Run, keep: Keep) -> None:
    """Time eager steps without and with cuDNN's attention, which prepares a plan for each length of the text."""
    for name, nodes, enabled in itertools.product(run.scale.kv_heads, (run.scale.check_nodes, 1), (False, True)):
        model, prompts = random_model(run, name, **LAYERS), random_prompts(run, [run.scale.check_context])
        method = random_method(run, model, nodes, settings_of(run))
        with cudnn_attention(enabled), run.alone():
            timed = {"ms": step_ms(method, prompts)} | run.clocks()
            timed |= profile_steps(method, prompts, run.on_gpu)
        keep(model=name, nodes=nodes, cudnn=enabled, **timed)


def settings_of(run: Run) -> Settings:
    return Settings(max_new_tokens=SKIPPED + run.scale.steps, ignore_eos=True)


def random_prompts(run: Run, lengths: Iterable[int]) -> list[list[int]]:
    """Make prompts of random tokens with these lengths."""
    return [torch.randint(run.scale.curve_shape["vocab_size"], (length,)).tolist() for length in lengths]


@contextmanager
def cudnn_attention(enabled: bool) -> Iterator[None]:
    """Allow or forbid cuDNN's attention inside the block."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
