"""Compiled steps on a CPU, called without the work that torch.compile does before each call.

torch.compile first checks its guards and collects the inputs of the compiled code. That takes 0.2 ms, a quarter of a
compiled step of stories260K. But while a text is written, the step's inputs are the same as long as the window of the
cache is: tensors that stay where they are. So the first step with a window goes through torch.compile, and the others
call the same code with the same inputs. Each text collects them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

Code = Callable[..., Sequence[Tensor]]
"""What torch.compile makes of a step: it takes the state as tensors and sizes, and changes it in place."""


class Call(NamedTuple):
    """A call of compiled code."""

    code: Code
    inputs: tuple[Any, ...]
    results: Sequence[Tensor]


class RecordingBackend:
    """A backend of torch.compile: inductor, the usual one, with code that records its last call.

    PyTorch keeps every backend for the life of the process. So this one refers to no step, and with it to no model."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings` are those of inductor."""
        self.settings = settings
        self.last: Call | None = None

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Code:
        """Compile the graph of a step."""
        from torch._inductor.compile_fx import compile_fx  # slow to import

        code = cast(Code, compile_fx(graph, inputs, config_patches=self.settings))

        def recorded(*inputs: Any) -> Sequence[Tensor]:
            results = code(*inputs)
            self.last = Call(code, inputs, results)
            return results

        return recorded

    def take(self) -> Call | None:
        """Return the last call, and keep it no longer."""
        last, self.last = self.last, None
        return last


class DirectStep:
    """Runs a compiled step, which takes no arguments, and calls its code directly where the inputs are known.

    Meanwhile, changes of autocast or of torch.compile's own settings have no effect."""

    def __init__(self, step: Callable[[], Tensor], backend: RecordingBackend) -> None:
        """Wrap `step`, which torch.compile compiles with `backend`."""
        self.step, self.backend = step, backend
        self.calls: dict[int, tuple[Code, tuple[Any, ...]]] = {}  # of each window: code and inputs

    def __call__(self, window: int) -> Tensor:
        """Run the step for a window of `window` cache slots."""
        if window in self.calls:
            code, inputs = self.calls[window]
            return code(*inputs)[0]
        try:
            result = self.step()
        finally:
            last = self.backend.take()
        # If the code gave more than the step's result, torch.compile would still have something to do with it.
        if last is not None and len(last.results) == 1 and last.results[0] is result:
            self.calls[window] = last.code, last.inputs
        return result

    def clear(self) -> None:
        """Forget all inputs, because they may change, or be freed."""
        self.calls.clear()
