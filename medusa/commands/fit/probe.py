"""A short probe of a model: checks that it can hold a tree, and times a batch of forwards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import perf_counter

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from decode.bench.methods import plain_method
from decode.compiled.stepper import why_not_compiled
from decode.settings import Settings
from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.errors import NotCompilableError
from medusa.loading import Loaded
from medusa.memory import bytes_of

SMALL = 30_000_000  # parameters; a smaller model answers more prompts at a time
ROWS = 64, 16  # prompts that small and other models answer at a time
# Small models copy their KV cache for longer than they compute, so the cache must hold as much as half an answer. Other
# models would read so many tokens for minutes.
READ = 128, 8  # tokens that the probe reads in each row, of small and other models
WRITE = 3  # tokens that it then writes one by one
ENOUGH, REPEATS = 1.0, 5  # the probe of one thing ends after so many seconds, or repetitions


@dataclass(frozen=True)
class Probe:
    """What a probe found: the model's size, and seconds for its forwards."""

    parameters: int
    model_bytes: int
    hidden_size: int
    vocab_size: int
    context: int | None
    device: str
    read_seconds: float  # to read one token as part of a batch, as in training
    batch_step_seconds: float  # to write one token in each of `batch_size` rows
    step_seconds: float  # to write one token in one row: a plain decoding step
    cache_bytes: int  # of a token in the KV cache
    layers: int = 0  # of the model
    not_compiled: str = ""  # why steps of the model cannot be compiled, if anything is known against it

    @property
    def batch_size(self) -> int:
        """The number of prompts that are answered at a time."""
        return ROWS[self.parameters >= SMALL]


@torch.inference_mode()
def probe(loaded: Loaded) -> Probe:
    """Check that a model can hold a tree, and time its forwards on random tokens, in seconds.

    Raise RequestError if the model does not support trees."""
    require_tree_forward(loaded.model)
    backbone = Backbone(loaded.model)
    parameters = loaded.model.num_parameters()
    size = parameters >= SMALL
    length = min(READ[size], (backbone.context or READ[size] + WRITE) - WRITE)
    read, batch_step, _ = _times(backbone, ROWS[size], length)
    _, step, cached = _times(backbone, 1, length)
    return Probe(
        parameters=parameters,
        model_bytes=bytes_of(loaded.model),
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        context=backbone.context,
        device=backbone.device.type,
        read_seconds=read / (ROWS[size] * length),
        batch_step_seconds=batch_step,
        step_seconds=step,
        cache_bytes=cached // (length + WRITE),
        layers=backbone.num_layers,
        not_compiled=why_not_compiled(backbone),
    )


def why_not_decoded(loaded: Loaded, settings: Settings) -> str:
    """Compile a plain decoding step with `settings`, and run it; return why this is not possible, "" if it is."""
    try:
        settings = replace(settings, max_new_tokens=2, ignore_eos=True, stop=(), compile=True)
        plain_method(loaded.model, settings.of_checkpoint(loaded.model.generation_config))([[loaded.bos_token_id or 0]])
    except NotCompilableError as error:
        return error.reason
    return ""


def _times(backbone: Backbone, rows: int, length: int) -> tuple[float, float, int]:
    """Return the least seconds to read `length` tokens in each of `rows` rows, and to write one more in each.

    The third number is the size of the KV cache in bytes after `length` + `WRITE` tokens."""
    reads, writes = list[float](), list[float]()
    generator = torch.Generator().manual_seed(0)
    while len(reads) < 2 or (sum(reads) + sum(writes) < ENOUGH and len(reads) < REPEATS):
        cache = DynamicCache(config=backbone.model.config)
        ids = torch.randint(backbone.vocab_size, (rows, length + WRITE), generator=generator).to(backbone.device)
        for part in (ids[:, :length], *ids[:, length:].split(1, dim=1)):
            start = perf_counter()
            logits = backbone.lm_head(backbone.hidden_states(part, past_key_values=cache, use_cache=True)[:, -1:])
            logits[0, -1, -1].item()  # waits until the device has computed it
            (reads if part.shape[1] > 1 else writes).append(perf_counter() - start)
        if sum(reads) + sum(writes) > 10 * ENOUGH:  # a large model: one repetition must do
            break
    cached = [
        tensor
        for layer in cache.layers
        if isinstance(layer, CacheLayerMixin)
        for tensor in (layer.keys, layer.values)
        if tensor is not None
    ]
    return min(reads), min(writes), sum(tensor.nbytes for tensor in cached)
