"""A short probe of a model: checks that it can hold a tree, and times a batch of forwards."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from transformers import DynamicCache

from decode.tree_check import require_tree_forward
from medusa.backbone import Backbone
from medusa.loading import Loaded
from medusa.memory import bytes_of

LARGE = 100_000_000  # parameters of a model that answers fewer prompts at a time
READ, WRITE = 8, 3  # tokens that the probe reads in each row, and then writes one by one
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

    @property
    def batch_size(self) -> int:
        """The number of prompts that are answered at a time."""
        return _rows(self.parameters)


@torch.inference_mode()
def probe(loaded: Loaded) -> Probe:
    """Check that a model can hold a tree, and time its forwards on random tokens, in seconds.

    Raise RequestError if the model does not support trees."""
    require_tree_forward(loaded.model)
    backbone = Backbone(loaded.model)
    parameters = loaded.model.num_parameters()
    read, batch_step = _times(backbone, _rows(parameters))
    _, step = _times(backbone, 1)
    return Probe(
        parameters=parameters,
        model_bytes=bytes_of(loaded.model),
        hidden_size=backbone.hidden_size,
        vocab_size=backbone.vocab_size,
        context=backbone.context,
        device=backbone.device.type,
        read_seconds=read / (_rows(parameters) * READ),
        batch_step_seconds=batch_step,
        step_seconds=step,
    )


def _rows(parameters: int) -> int:
    return 16 if parameters >= LARGE else 64


def _times(backbone: Backbone, rows: int) -> tuple[float, float]:
    """Return the least seconds to read `READ` tokens in each of `rows` rows, and to write one token in each."""
    reads, writes = list[float](), list[float]()
    generator = torch.Generator().manual_seed(0)
    while len(reads) < 2 or (sum(reads) + sum(writes) < ENOUGH and len(reads) < REPEATS):
        cache = DynamicCache(config=backbone.model.config)
        ids = torch.randint(backbone.vocab_size, (rows, READ + WRITE), generator=generator).to(backbone.device)
        for part in (ids[:, :READ], *ids[:, READ:].split(1, dim=1)):
            start = perf_counter()
            logits = backbone.model(input_ids=part, past_key_values=cache, logits_to_keep=1).logits
            logits[0, -1, -1].item()  # waits until the device has computed it
            (reads if part.shape[1] > 1 else writes).append(perf_counter() - start)
        if sum(reads) + sum(writes) > 10 * ENOUGH:  # a large model: one repetition must do
            break
    return min(reads), min(writes)
