"""What a run uses of its device by default, and the memory that it needs, computed from sizes without a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from medusa.config import MedusaConfig
from medusa.cpu import has_fast_bfloat16
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.independent import MedusaHeads
from train.arguments import MedusaTrainingArguments
from train.config import TrainConfig
from train.loss.targets import chunk_rows

READERS = 2  # processes that read features: a row of a 7 B model is 17 MB, and reading it must not delay a step
ADAM_BYTES = 16  # of a trained weight in float32: itself, its gradient and two moments of AdamW
HALF_BYTES = 2  # of the copy of a trained weight in bfloat16, in which the products are computed
BACKBONE_WIDTH = 16  # numbers that the backbone holds at once for a token, as a multiple of the hidden size
HEAD_WIDTH = 6  # the same for each head and token in float32: inputs, products and gradients of a block
RESERVE = 0.9  # share of a card's memory that a run can use; the driver and gaps between tensors take the rest
GIB = 2**30
CARDS = (24, 40, 80)  # GiB


def require_own_device(device: str | None) -> None:
    """Raise RequestError for a GPU such as cuda:1 on which this process cannot train.

    transformers trains on the GPU with the number of the process, cuda:0 for a single one."""
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if (device or "").startswith("cuda:") and device != own:
        way = "take device: cuda, and choose the GPU with the environment variable CUDA_VISIBLE_DEVICES"
        raise RequestError(f"device is {device}, but this process trains on {own}; {way}")


def device_defaults(config: TrainConfig, from_disk: bool) -> Json:
    """Return the arguments that suit the device of a recipe; `from_disk`: hidden states come from files."""
    training = config.training
    on_cpu = (config.device or "").startswith("cpu") or training.get("use_cpu") is True
    if on_cpu or not torch.cuda.is_available():
        return {"use_cpu": on_cpu, "dataloader_pin_memory": False}
    found: Json = {"use_cpu": False, "dataloader_pin_memory": True}
    if not {"bf16", "fp16"} & training.keys():
        found["bf16"] = torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.cuda.get_device_capability() >= (8, 0):
        found["tf32"] = True
    if from_disk and "dataloader_num_workers" not in training:
        found |= {"dataloader_num_workers": READERS, "dataloader_persistent_workers": True}
    return found


def describe_precision(arguments: MedusaTrainingArguments, backbone: torch.dtype) -> str:
    """Say in one line in which dtypes a run computes."""
    lower = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else None
    heads = "float32" if lower is None else f"{lower}, their weights in float32"
    rest = "; TF32 for float32 products" if arguments.tf32 else ""
    if arguments.bf16 and arguments.use_cpu and not has_fast_bfloat16():
        rest += "; this CPU names no bfloat16 instructions, without which training.bf16=false is many times as fast"
    return f"precision: the backbone computes in {str(backbone).removeprefix('torch.')}, the heads in {heads}{rest}"


@contextmanager
def precision_restored() -> Iterator[None]:
    """Restore the precision of float32 products afterwards, which `tf32` changes for the whole process.

    Decoding in the same process, such as in `medusa fit`, then computes as in any other process."""
    backends: Any = torch.backends  # whose type stubs lack this setting
    before = backends.fp32_precision
    try:
        yield
    finally:
        backends.fp32_precision = before


class HeadsSize(NamedTuple):
    """The sizes of a set of heads that decide how much memory its training needs."""

    num_heads: int
    trained: int  # weights, of which `own` are those of own LM heads
    own: int
    vocab_size: int  # number of tokens that the heads guess among


def heads_size(config: MedusaConfig, vocab_size: int) -> HeadsSize:
    """Return the sizes of the heads of a config for a backbone with `vocab_size` tokens, without allocating them."""
    with torch.device("meta"):
        heads = MedusaHeads.from_config(config)
    own = 0 if heads.lm_heads is None else heads.lm_heads.numel()
    trained = sum(parameter.numel() for parameter in heads.parameters())
    return HeadsSize(config.num_heads, trained, own, config.draft_vocab_size(vocab_size))


def training_bytes(heads: HeadsSize, backbone_bytes: int, hidden_size: int, tokens: int, device: str) -> int:
    """Compute the memory in bytes to train heads by AdamW on batches of `tokens` tokens on a frozen backbone.

    `device` is "cpu" or "cuda", where products are computed in bfloat16 by default. The sum holds the backbone, the
    heads with gradients and moments, a chunk of logits with their gradient, and what backbone and heads hold for a
    batch. It is for one process: several, or float16, hold the gradient of own LM heads twice when they accumulate."""
    half = HALF_BYTES if device != "cpu" else 0
    weights = (ADAM_BYTES + half) * heads.trained
    if heads.own:
        weights += half * hidden_size * heads.vocab_size  # a chunk's product, before it is added to the gradient
    rows = min(tokens, chunk_rows(heads.num_heads, heads.vocab_size, device, own=heads.own > 0))
    # The logits of all heads in float32, their gradient in the LM head's dtype, and one head's log-probabilities.
    logits = rows * heads.vocab_size * ((4 + (half or 4)) * heads.num_heads + 4)
    held = tokens * hidden_size * (BACKBONE_WIDTH * (half or 4) + HEAD_WIDTH * 4 * heads.num_heads)
    return backbone_bytes + weights + logits + held


def fits(needed: int, card: int) -> bool:
    """Whether a GPU with a memory of `card` GiB holds a run that needs so many bytes."""
    return needed <= RESERVE * card * GIB
