"""Counts the moments at which the host waits for the device, on a CPU that stands for a GPU.

A wait is counted where a GPU would make the host wait:
- reading a tensor's values: `tolist`, `item`, `bool`, `int`, `float`, an index, `numpy`, `cpu`;
- operations whose result's shape depends on values: `nonzero`, `masked_select`, an index that is a mask, `unique`,
  `repeat_interleave` with counts in a tensor; and `multinomial`, which checks its input, twice;
- copies of ordinary memory to the device: `torch.tensor(numbers, device=...)`, `as_tensor`, `new_tensor`. Those of
  `decode.ops.transfer.on_device` come from pinned memory and are not counted.

A copy by `.to(device)` looks like nothing on a CPU; the tests on a second device find those."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
BY_VALUE = ("nonzero", "masked_select", "unique", "item.", "_local_scalar_dense", "bincount", "equal.default")
READS = ("tolist", "numpy", "cpu", "new_tensor")


def is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


class HostWaits(TorchDispatchMode):
    """Counts waits by their kind and place while it is entered; `places` says where they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        for name in READS:
            monkeypatch.setattr(Tensor, name, self._counted(name, getattr(Tensor, name)))
        for name in ("tensor", "as_tensor"):
            monkeypatch.setattr(
                torch, name, self._counted(name, getattr(torch, name), lambda kwargs: "device" in kwargs)
            )

    def _counted(
        self, name: str, function: Callable[..., Any], waits: Callable[[dict[str, Any]], bool] = lambda kwargs: True
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if waits(kwargs):
                self.add(name)
            return function(*args, **kwargs)

        return call

    def add(self, kind: str, times: int = 1) -> None:
        frames = [
            f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT)) and "tests" not in f.filename
        ]
        place = f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "a test"
        self.found[kind, place] += times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in BY_VALUE) or name == "aten.repeat_interleave.Tensor":
            self.add(name)
        elif name == "aten.multinomial.default":
            self.add(name, times=2)
        elif name.split(".")[1] in ("index", "index_put", "index_put_") and any(map(is_mask, args[1])):
            self.add(f"{name} by a mask")
        return func(*args, **(kwargs or {}))

    def places(self) -> str:
        return "\n".join(f"{times} x {kind} at {place}" for (kind, place), times in self.found.most_common())

    def take(self) -> int:
        """The number of waits since the last call."""
        count = self.found.total()
        self.found.clear()
        return count
