"""The memory use of a module's parameters, the peak memory of the process and of each GPU, and its release."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from medusa.quantization import quantized_layers


def peak_memory() -> dict[str, int]:
    """Return the peak memory in bytes: of the `process`, and of tensors on each GPU, such as `cuda:0`."""
    if sys.platform == "win32":
        import psutil  # a dependency of accelerate

        process = int(psutil.Process().memory_info().peak_wset)
    else:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
        process = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = {"process": process}
    if torch.cuda.is_initialized():
        peak |= {f"cuda:{gpu}": torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count())}
    return peak


def total_memory(device: torch.device) -> int:
    """Return the size of the memory that holds tensors of `device`, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil  # a dependency of accelerate

    total, limits = int(psutil.virtual_memory().total), container_limits()
    return total if limits is None else min(total, limits[0])


def free_memory(device: torch.device) -> int:
    """Return how much memory is free for tensors of `device`, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # a dependency of accelerate

    available, limits = int(psutil.virtual_memory().available), container_limits()
    return available if limits is None else min(available, max(limits[0] - limits[1], 0))


def container_limits(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """Return the memory that Linux grants this process's container, and what it uses, in bytes; `None`: no limit.

    Files that were read and that memory need not keep do not count as used."""
    for limit, usage, stat, name in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most, used = int((root / limit).read_text()), int((root / usage).read_text())
            held = dict(line.split() for line in (root / stat).read_text().splitlines())
        except (OSError, ValueError):  # another version of control groups, another system, or the limit `max`
            continue
        return most, max(used - int(held.get(name, 0)), 0)
    return None


def devices_of(module: nn.Module) -> set[torch.device]:
    """Return the devices that hold a module's parameters; several if `--device auto` spread a model over GPUs.

    Layers that are kept in main memory or on disk until they run count as on no device."""
    return {parameter.device for parameter in module.parameters()} - {torch.device("meta")}


def release() -> None:
    """Free the memory of models that are no longer used, before another one is loaded, and reset the peaks of GPUs.

    A finished trainer and its model refer to each other, so without this they stay until Python happens to look."""
    gc.collect()
    if torch.cuda.is_initialized():  # before that, there is nothing to free and no peak
        torch.cuda.empty_cache()
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(gpu)


def bytes_of(module: nn.Module) -> int:
    """Return the memory of a module's parameters in bytes; of quantised ones, that of the tensors that they consist of.

    Layers that keep packed weights in buffers, such as those of GPTQ, count too."""
    packed = (buffer for layer in quantized_layers(module).values() for buffer in layer.buffers(recurse=False))
    states = (*module.parameters(), *packed)
    return sum(plain.numel() * plain.element_size() for state in states for plain in plain_tensors(state))


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that a quantised tensor consists of; of any other tensor, itself."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)  # asking the tensor itself takes ten times as long
    if flatten is not None:
        names, _ = flatten(tensor)
        for name in names:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor
