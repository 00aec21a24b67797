"""Clock, power and temperature of the GPU, which figures carry: a GPU that is hot or limited measures other times."""

from __future__ import annotations

import subprocess

import torch

FIELDS = ("clocks.sm", "power.draw", "temperature.gpu")  # nvidia-smi: MHz, W, degrees Celsius
NAMES = ("sm_mhz", "watts", "celsius")


def gpu_state(device: torch.device) -> dict[str, float | str | None]:
    """Read the clock of the processors in MHz, the power in W and the temperature in degrees Celsius of a GPU.

    NVML averages over up to a second, so read them right after the work. PyTorch asks NVML, which needs the package
    nvidia-ml-py; without it, nvidia-smi is asked. Values that neither gives are `None`, with reasons in `no_clocks`."""
    problems = []
    for read in (_by_nvml, _by_nvidia_smi):
        try:
            return dict(zip(NAMES, read(device), strict=True))
        except Exception as error:  # NVML's errors have no common base class; a figure is worth more than its clock
            problems.append(f"{type(error).__name__}: {error}".splitlines()[0][:100])
    return dict.fromkeys(NAMES) | {"no_clocks": "; ".join(problems)}


def _by_nvml(device: torch.device) -> list[float | None]:
    watts = torch.cuda.power_draw(device) / 1000  # in mW
    return [torch.cuda.clock_rate(device), watts, torch.cuda.temperature(device)]


def _by_nvidia_smi(device: torch.device) -> list[float | None]:
    """Ask nvidia-smi, by the GPU's UUID because it numbers GPUs differently. A field that a GPU lacks is `None`."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout
    return [float(value) if value.strip()[:1].isdigit() else None for value in line.strip().split(",")]
