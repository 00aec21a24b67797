"""Waiting for a device, so that clocks measure its work and not only the time to order it."""

from __future__ import annotations

import torch


def synchronize(device: torch.device) -> None:
    """Wait until `device` has finished all work that was ordered. On a CPU, work is finished when a call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
