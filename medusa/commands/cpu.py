"""Loads a command's model, and chooses how a CPU computes it: threads and dtype, by timing a few of the layers.

Nothing is kept, because other programs change the result. Both choices change roundings, and so texts at near ties:
threads are chosen only where a line says so, and the dtype only by `--dtype auto`."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from decode.bench.machine import stopwatch
from decode.ops.fast_linear import fast_linear, prepare_linear
from medusa.backbone import Backbone
from medusa.commands.options import Output
from medusa.cpu import has_fast_bfloat16
from medusa.loading import BackboneFiles, Loaded
from medusa.memory import devices_of
from medusa.options import dtype_name
from medusa.quantization import quantized_layers

PROBED = 20_000_000  # parameters; smaller models take a few milliseconds a step
TOKENS, BATCH_TOKENS = 8, 256  # of a forward: a small tree's, and one that computes as long for a weight as training
SAMPLE = 24_000_000  # parameters of layers that are timed, at least, if the model has so many
SECONDS = 0.1  # to time one setting, or twice what a forward takes
GAIN = 1.05  # a speedup that counts
PRICE = "texts can differ where two tokens are nearly equally probable"


class Tuned(NamedTuple):
    """A loaded backbone, and what was found out about it."""

    loaded: Loaded
    bfloat16: float = 0.0  # how many times as fast bfloat16 makes a small tree's step as float32; 0: not measured
    training_threads: int = 0  # that make large forwards fastest; 0: not measured


def load_tuned(files: BackboneFiles, threads: int | None, output: Output, trains: bool = False) -> Tuned:
    """Load a backbone; on a CPU, set the number of threads unless it is given, and settle or advise the dtype.

    With --quiet, only `--dtype auto` is measured. `trains`: whether to look for threads for training, too."""
    loaded, auto = files.load(), files.options.dtype == "auto"
    model = loaded.model
    told = model.num_parameters() >= PROBED and not output.quiet
    if devices_of(model) != {torch.device("cpu")}:
        if auto:
            output.note(f"dtype: {dtype_name(model.dtype)}, the checkpoint's")
        return Tuned(loaded)
    sample = sampled(model) if told or auto else None
    training = threads or 0
    if sample is not None and told and threads is None:
        if trains:
            training, _ = fewest_threads(sample.timer(BATCH_TOKENS))
        chosen, line = fewest_threads(sample.timer(TOKENS))
        torch.set_num_threads(chosen)
        if line:
            output.note(line)
    if not auto and (sample is None or files.options.dtype is not None):
        return Tuned(loaded, 0.0, training)
    gain, timed = bfloat16_gain(sample), sample is not None
    if auto and model.dtype == torch.bfloat16 and gain < GAIN:
        del model, sample, loaded
        loaded = replace(files, options=replace(files.options, dtype="float32")).load()
    if auto:
        by = PRICE if gain >= GAIN else "no speedup by bfloat16 was measured" if timed else "steps could not be timed"
        times = f", because steps are {gain:.1f} times as fast here as in float32" if gain >= GAIN else ""
        output.note(f"dtype: {dtype_name(loaded.model.dtype)}{times}; {by}")
    elif gain >= GAIN:
        output.note(f"dtype: float32; --dtype bfloat16 makes steps {gain:.1f} times as fast here, but {PRICE}")
    return Tuned(loaded, gain, training)


def bfloat16_gain(sample: Sample | None) -> float:
    """Return how many times as fast bfloat16 makes a small tree's step as float32; 0 where it cannot be faster."""
    if sample is None or not has_fast_bfloat16() or quantized_layers(sample.backbone.model):
        return 0.0
    clock = stopwatch(torch.device("cpu"))
    full, half = (sample.timer(TOKENS, dtype, clock) for dtype in (torch.float32, torch.bfloat16))
    return median(full() / half() for _ in range(3))


def fewest_threads(timer: Callable[[], float]) -> tuple[int, str]:
    """Return the fewest threads whose time is within `GAIN` of the best, and a line that says why.

    `timer` times a step in seconds with the current number of threads. The line is empty if there is no choice."""
    before, most = torch.get_num_threads(), usual_threads()
    seconds: dict[int, float] = {}
    try:
        for count in sorted({1, most // 2 if most >= 4 else 1, most}):
            torch.set_num_threads(count)
            seconds[count] = timer()
    finally:
        torch.set_num_threads(before)
    best = next(count for count, taken in seconds.items() if taken <= GAIN * min(seconds.values()))
    if most == 1:
        return best, ""
    others = ", ".join(f"{count}: {_ms(taken)}" for count, taken in seconds.items() if count != best)
    busy = ", perhaps because other programs use the cores" if seconds[most] > 1.5 * seconds[1] else ""
    return best, f"threads: {best} of {most}, because a step takes about {_ms(seconds[best])} ms ({others}{busy})"


@cache
def usual_threads() -> int:
    """The number of threads that PyTorch takes by itself, or that the environment gives it."""
    return torch.get_num_threads()


class Sample:
    """Some layers of a model with their inputs, and its LM head: enough to time a forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take the first layers of a model; any error may come from a model whose layers are unusual."""
        self.backbone = backbone = Backbone(model)
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in backbone.layers]
        count = next((n for n in range(1, len(sizes)) if sum(sizes[:n]) >= SAMPLE), len(sizes))
        self.layers = list(backbone.layers[:count])
        head = backbone.head_weight.numel()
        self.share = (sum(sizes[:count]) + head) / (sum(sizes) + head)  # of the work of a step
        self.calls = {tokens: captured(backbone, self.layers, tokens) for tokens in (TOKENS, BATCH_TOKENS)}

    def timer(
        self, tokens: int, dtype: torch.dtype | None = None, clock: Callable[[], float] = perf_counter
    ) -> Callable[[], float]:
        """Return a function that times a forward over so many tokens in seconds, in `dtype` or in the model's."""
        backbone, dtype = self.backbone, dtype or self.backbone.dtype
        parts = nn.ModuleList([*self.layers, backbone.head])
        if dtype != backbone.dtype:
            parts = copy.deepcopy(parts).to(dtype)
        prepare_linear(parts)
        states = torch.ones(1, tokens, backbone.hidden_size, dtype=dtype)
        inputs = [*tree_map(partial(_cast, dtype), self.calls[tokens]), ((states,), {})]
        largest = max(parts[-1].parameters(), key=torch.Tensor.numel)

        @torch.inference_mode()
        def seconds() -> float:
            begun = clock()
            with fast_linear(largest, tokens):
                for part, (args, kwargs) in zip(parts, inputs, strict=True):
                    part(*args, **kwargs)
            return clock() - begun

        def timed() -> float:
            times = [seconds(), seconds()]
            while sum(times) < SECONDS:
                times.append(seconds())
            return median(times[1:]) / self.share  # the first forward may allocate memory and start threads

        return timed


def sampled(model: PreTrainedModel) -> Sample | None:
    """Return a sample of the model's layers that can be timed; `None` if its layers do not run alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # several may be slow; that is to be found out
    try:
        sample = Sample(model)
        sample.timer(TOKENS)()
    except Exception:  # code of the model's own: a trial may find nothing, but not end the command
        return None
    finally:
        torch.set_num_threads(before)
    return sample


Call = tuple[tuple[Any, ...], dict[str, Any]]


class _SeenError(Exception):
    """Ends a forward whose later layers are not needed."""


def captured(backbone: Backbone, layers: list[nn.Module], tokens: int) -> list[Call]:
    """Return the arguments of the `layers`, the model's first ones, in a forward over `tokens` tokens."""
    calls: list[Call] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))
        if len(calls) == len(layers):
            raise _SeenError

    with hooked(layers, keep), contextlib.suppress(_SeenError), torch.no_grad():
        backbone.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return calls


@contextlib.contextmanager
def hooked(layers: list[nn.Module], hook: Callable[..., None]) -> Iterator[None]:
    """Call `hook` before each of the `layers` runs."""
    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast(dtype: torch.dtype, value: object) -> object:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:.0f}"
