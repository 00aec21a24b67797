"""CUDA graphs of compiled steps, captured by ourselves: one graph for each window of the cache.

All state of a region stays at fixed addresses, and a step has no other inputs. So its kernels can be captured as they
are, without torch's CUDA graph trees. Those copy and check inputs in every step (some 0.1 ms) and belong to a thread,
while a graph captured here can be replayed from any thread."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Size = TypeVar("Size", bound=Hashable)
Result = TypeVar("Result")
CAPTURING = threading.Lock()
"""Held while a graph is captured, because PyTorch's memory and random numbers know one capture of a process only."""


def graphs_for(asked: str, device: torch.device) -> str:
    """Choose how the steps of a session on `device` use CUDA graphs, if the user has `asked` for one of `CUDA_GRAPHS`.

    Outside the main thread, torch's graphs are left out: torch 2.11 and 2.12 fail there, and later versions record all
    graphs again in each thread."""
    if not possible(device) or (asked == "torch" and threading.current_thread() is not threading.main_thread()):
        return "off"
    return asked


def possible(device: torch.device) -> bool:
    """Whether tensors on `device` can be used in CUDA graphs."""
    return device.type == "cuda"


class GraphedStep(Generic[Size, Result]):
    """Runs a step as CUDA graphs, one for each of its sizes. Its state, and its results, have fixed addresses.

    A captured step does not run: its graph is replayed instead. The first step of a size is not captured, because it
    may still compile, choose kernels and allocate workspaces. A step that cannot be captured runs without a graph."""

    def __init__(self, step: Callable[[Size], Result], device: torch.device, what: str = "steps run") -> None:
        """Wrap `step`, all tensors of which are on `device`; warnings begin with `what`."""
        self.step, self.device, self.what = step, device, what
        self.graphs: dict[Size, tuple[torch.cuda.CUDAGraph, Result] | None] = {}  # `None`: its first step ran
        self.stream: torch.cuda.Stream | None = None  # of all captures; PyTorch's own belongs to one device
        self.possible = True  # until a capture fails, which may have a cause that passes, such as memory

    def __call__(self, size: Size) -> Result:
        """Run the step of this size, such as a window of the cache; its result stays valid until the next step."""
        captured = self.graphs.get(size)
        if size not in self.graphs or not (captured or self.possible):
            result = self.step(size)
            self.graphs[size] = None  # after the step, which may fail
            return result
        if captured is None:
            try:
                captured = self.graphs[size] = self._capture(size)
            except RuntimeError as error:
                self.possible = False
                reason = str(error).strip().split("\n")[0]
                warnings.warn(f"{self.what} without CUDA graphs, because capturing one failed: {reason}", stacklevel=2)
                return self.step(size)
        graph, result = captured
        graph.replay()
        return result

    def _capture(self, size: Size) -> tuple[torch.cuda.CUDAGraph, Result]:
        # Graphs never run at the same time and keep nothing between steps, so they can share their working memory.
        pool = next((kept[0].pool() for kept in self.graphs.values() if kept is not None), None)
        with CAPTURING, torch.cuda.device(self.device):
            self.stream = self.stream or torch.cuda.Stream(self.device)
            graph = torch.cuda.CUDAGraph()
            # After a capture that failed, `torch.cuda.graph` may leave its stream the current one.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                result = self.step(size)
        return graph, result

    def clear(self) -> None:
        """Drop all graphs, because the state moves to other addresses; a graph that failed may be tried again."""
        self.graphs.clear()
        self.possible = True
