"""Compiled steps on a CPU, called without the work that torch.compile does before each call.

torch.compile first checks its guards and collects the inputs of the compiled code. That takes 0.2 ms, a quarter of a
compiled step of stories260K. But the state of a region stays at fixed addresses, and a step has no other inputs. So the
first step with a window of the cache goes through torch.compile, and the others call the same code with the same
inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Code = Callable[..., Sequence[Tensor]]
"""What torch.compile makes of a step: it takes the state as tensors and sizes, and changes it in place."""


class Call(NamedTuple):
    """A call of compiled code."""

    code: Code
    inputs: tuple[Any, ...]
    results: Sequence[Tensor]


class DirectStep:
    """Runs a step that torch.compile compiles with `backend`. It takes no arguments, and its state does not move."""

    def __init__(self, step: Callable[[], Tensor], settings: dict[str, Any]) -> None:
        """Wrap the compiled `step`; `settings` are those of inductor, PyTorch's compiler."""
        self.step, self.settings = step, settings
        self.last: Call | None = None  # the call that torch.compile has just made
        self.calls: dict[int, tuple[Code, tuple[Any, ...]]] = {}  # of each window: code and inputs

    def backend(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Code:
        """Compile the graph of a step as torch.compile does by default; the code then notes its calls in `last`."""
        inductor = torch._dynamo.lookup_backend("inductor")
        code: Code = inductor(graph, inputs, config_patches=self.settings)  # type: ignore[call-arg]

        def noted(*inputs: Any) -> Sequence[Tensor]:
            results = code(*inputs)
            self.last = Call(code, inputs, results)
            return results

        return noted

    def __call__(self, window: int) -> Tensor:
        """Run the step for a window of `window` cache slots."""
        if window in self.calls:
            code, inputs = self.calls[window]
            return code(*inputs)[0]
        self.last = None
        result = self.step()
        # If the code gave more than the step's result, torch.compile would still have something to do with it.
        if self.last is not None and len(self.last.results) == 1 and self.last.results[0] is result:
            self.calls[window] = self.last.code, self.last.inputs
        self.last = None
        return result

    def clear(self) -> None:
        """Forget all inputs, because the state moves to other addresses."""
        self.calls.clear()
