"""medusa.memory: what a GPU that this process has not used yet allows."""

from __future__ import annotations

import pytest
import torch

from medusa import memory


def test_memory_is_released_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A continued `medusa fit` releases memory before it computes anything; PyTorch then knows no GPU by its number."""

    def refuse(gpu: int) -> None:
        raise RuntimeError("Invalid device argument")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", refuse)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    memory.release()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="Invalid device"):
        memory.release()


def test_layers_that_wait_on_disk_are_on_no_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert memory.devices_of(model) == {torch.device("cpu")}
