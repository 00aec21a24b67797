"""Stand-ins for PyTorch's compiler, because machine code takes most of the time of a compiled step's test."""

from __future__ import annotations

from collections.abc import Callable
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
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let each captured graph run as it is. Gives the addresses of its inputs in each run."""
    addresses: list[tuple[int, ...]] = []

    def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Callable[..., Any]:
        made = [node for node in graph.graph.nodes if getattr(node.target, "__name__", "") == "tensor"]
        assert not made, "a tensor made from numbers of the host is copied in every step, which no CUDA graph can hold"

        def run(*args: Any) -> Any:
            addresses.append(tuple(arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)))
            return graph(*args)

        return run

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)  # slow to import, and few tests need it
    return addresses
