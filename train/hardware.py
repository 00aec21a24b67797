"""What a run uses of its device by default: bfloat16, TF32, pinned memory, and processes that read data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from medusa.cpu import has_fast_bfloat16
from medusa.errors import RequestError
from medusa.files import Json
from train.arguments import MedusaTrainingArguments
from train.config import TrainConfig

READERS = 2  # processes that read features: a row of a 7 B model is 17 MB, and reading it must not delay a step


def require_own_device(device: str | None) -> None:
    """Raise RequestError for a GPU such as cuda:1 on which this process cannot train.

    transformers trains on the GPU with the number of the process, cuda:0 for a single one."""
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if (device or "").startswith("cuda:") and device != own:
        way = "take device: cuda, and choose the GPU with the environment variable CUDA_VISIBLE_DEVICES"
        raise RequestError(f"device is {device}, but this process trains on {own}; {way}")


def device_defaults(config: TrainConfig, from_disk: bool) -> Json:
    """Return the training arguments that suit the device of a recipe; `from_disk`: hidden states come from files."""
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
    """Describe in one line in which dtypes a run computes."""
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
