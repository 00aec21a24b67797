"""Stand-ins for PyTorch's compiler, because machine code takes most of the time of a compiled step's test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import run_as_written


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run compiled steps as they are written, without torch.compile."""
    run_as_written(monkeypatch)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Let each captured graph run as it is. Gives the settings with which it would have been compiled."""
    settings: list[dict[str, Any]] = []

    def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor], config_patches: dict[str, Any], **_: Any) -> Any:
        made = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "tensor"]
        assert not made, "a tensor made from numbers of the host is copied in every step, which no CUDA graph can hold"
        settings.append(config_patches)
        return graph

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)  # slow to import, and few tests need it
    return settings
