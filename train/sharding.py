"""Sharding of a frozen backbone over several processes (FSDP2), for a backbone that is too large for a single GPU.

Each decoder block is gathered only while it runs. The embedding and the LM head stay whole on every process, because
the loss reads the LM head's weights in chunks. Heads are trained with DDP.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PretrainedConfig, PreTrainedModel

from medusa.errors import RequestError
from medusa.options import LoadOptions


def placement(options: LoadOptions, shard: bool, config: PretrainedConfig) -> LoadOptions:
    """The options with which this process loads the backbone: its own GPU, if a launcher started several processes.

    With `shard`, the backbone is first loaded into main memory, by default in the dtype of `config`.
    """
    device, rank = options.device, os.environ.get("LOCAL_RANK")
    if device in (None, "cuda"):
        device = f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
    if not shard or device is None:
        return replace(options, device=device)
    dtype = options.dtype or str(config.dtype or torch.float32).removeprefix("torch.")
    return replace(options, device="cpu", dtype=dtype)


def shard_backbone(model: PreTrainedModel, device: torch.device) -> None:
    """Shard a frozen `model` over all processes, in place, except embedding and LM head: `device` holds these whole.

    Raise RequestError if there is only one process, or if the model does not name its decoder blocks.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        start = "start with torchrun --nproc-per-node N -m medusa train ..."
        raise RequestError(f"shard_backbone: true needs several processes; {start}")
    if not blocks(model):
        raise RequestError(f"{type(model).__name__} does not name its blocks; leave shard_backbone out")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    for module in whole:
        module.to(device)
    kept = {parameter for module in whole for parameter in module.parameters()}
    for block in blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model.get_decoder(), mesh=mesh, ignored_params=kept)


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks of a model, found by their class names, which transformers lists in `_no_split_modules`."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
