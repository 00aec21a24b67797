"""medusa.memory: what containers grant, and what a GPU that this process has not used yet allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from medusa import memory

MODERN = "memory.max", "memory.current", ""


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


@pytest.mark.parametrize("folder", ["", "memory"], ids=["version 2", "version 1"])
def test_memory_of_a_container(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that were read and need not stay in memory do not count; a container without a limit has the machine's."""
    limit, used, held = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_") if folder else MODERN
    (tmp_path / folder).mkdir(exist_ok=True)
    files = {limit: "3000\n", used: "1700\n", "memory.stat": f"anon 800\n{held}inactive_file 500\n"}
    for name, content in files.items():
        (tmp_path / folder / name).write_text(content)
    assert memory.container_limits(tmp_path) == (3000, 1200)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "container_limits", lambda: (3000, 1200))
        assert memory.total_memory(torch.device("cpu")) == 3000
        assert memory.free_memory(torch.device("cpu")) == 1800
    (tmp_path / folder / limit).write_text("max\n")
    assert memory.container_limits(tmp_path) is None
