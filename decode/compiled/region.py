"""Compiled regions: each is a compiled decoding step with its caches. A model keeps some of its regions for reuse.

Shapes: B rows of the batch, N nodes of a draft, D its depth, H hidden size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import Lock
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.cache import TreeCache
from decode.compiled.graphs import GraphedStep
from decode.compiled.keys import Key, modules_of
from decode.compiled.prompts import BUCKETS, PromptGraphs
from decode.compiled.sampling import Kind, Sampler
from decode.draft import Drafter, KeepsProducts
from decode.drafters.layouts import Layout
from decode.ops.attention import grouped
from decode.ops.fast_linear import fast_linear
from decode.session import Session
from decode.step import State, decode_step
from medusa.backbone import Backbone, Readout
from medusa.memory import plain_tensors, total_memory

KEPT = 32
"""Maximum number of compiled regions that a model keeps; the least recently used region is dropped first."""
SHARE = 1 / 8
"""Part of the device's memory that the caches of kept regions may fill; the least recently used are freed first."""


class CompiledStep(NamedTuple):
    """A step that is compiled for a number of rows and a kind of sampling."""

    number: int  # among the steps of its region
    kind: Kind
    rows: int
    run: Callable[[], Tensor]


class Region:
    """Compiled steps (`decode.step`) for a tree, with the state of their rows.

    A region of a running batch has a step for each number of rows and each kind of sampling that was needed. All of
    them read and write the first rows of the same tensors, so that texts can join and leave, and nothing moves."""

    def __init__(
        self,
        state: State,
        drafter: Drafter,
        sampler: Sampler,
        tree: Layout,
        graphs: str,
        heads: nn.Module | None,
        sizes: Sequence[int],
        joins: bool,
    ) -> None:
        """Compile steps on `state`, with drafts that fill `tree`; `sampler` decides on them.

        `graphs` is one of `CUDA_GRAPHS`. `heads` are those of the drafter, if it has any. `sizes` are the numbers of
        rows that steps may have, in ascending order; the last one is that of the rows of `state`. `joins`: whether
        texts may join."""
        self.state, self.drafter, self.sampler, self.sizes = state, drafter, sampler, sizes
        self.backbone, self.caches = state.reader.backbone, state.caches
        self.nodes, self.longest = tree.num_nodes, tree.max_depth + 1  # caches of heads read no more of a path
        self.heads = heads
        self.addresses = self._addresses()
        # Torch 2.13 may write a result into part of a finished `cat`, and still reuse that memory. A recurrent head
        # then read the next token's embedding instead of its state.
        self.settings = {"inplace_buffers": False, "triton.cudagraphs": graphs == "torch"}
        self.kind = sampler.kind  # of the live rows together
        self.steps: list[CompiledStep] = []
        self.step: CompiledStep | None = None  # that of the live rows, if it is chosen already
        own = graphs == "own"
        self.graphed = GraphedStep(self._graphed, self.backbone.device) if own else None
        # Prompts are read into the rows of the texts, or, if texts join, each into a cache of its own.
        self.reads = state.like(1, BUCKETS[-1]) if joins else state
        self.prompts = PromptGraphs(self.reads.reader, self.reads.heads_cache) if own else None

    def __call__(self) -> Tensor:
        """Run one decoding step, after `open`; returns `Decided.packed`."""
        step = self._chosen()
        return self._as_compiled(step) if self.graphed is None else self.graphed((step.number, self.caches[0].width))

    def _graphed(self, size: tuple[int, int]) -> Tensor:
        return self._as_compiled(self.steps[size[0]])

    def _as_compiled(self, step: CompiledStep) -> Tensor:
        # torch.compile cannot enter the contexts of this thread, so they are open before.
        reader = self.state.reader
        linear = fast_linear(self.backbone.head_weight, 2 * step.rows)
        with grouped(self.backbone.config), linear, reader.backbone.watched():
            return step.run()

    def _step(self) -> Tensor:
        return decode_step(self.state, self.drafter, self.sampler, nothing).packed

    def _chosen(self) -> CompiledStep:
        """The step for the live rows and their kind. It is compiled if no compiled one of as many rows decides for all.

        So few steps are compiled: each stops all texts for seconds to minutes."""
        if self.step is None:
            rows = next(size for size in self.sizes if size >= len(self.state.rows))
            fitting = [one for one in self.steps if one.rows == rows and one.kind.joined(self.kind) == one.kind]
            self.step = min(fitting, key=lambda one: one.kind.work, default=None)
            self._show(self.kind if self.step is None else self.step.kind, rows)
        if self.step is None:
            self._fill_tables()
            self.step = CompiledStep(len(self.steps), self.kind, rows, compiled(self._step, self.settings))
            self.steps.append(self.step)
        return self.step

    def _show(self, kind: Kind, rows: int) -> None:
        """Let steps see so many rows, and decide by the code of `kind`."""
        self.state.show(rows)
        self.sampler.show(kind, rows)
        for tensor in (self.state.root, self.state.hidden, self.state.alive, *self.sampler.buffers):
            static(tensor)

    def _fill_tables(self) -> None:
        """Fill tables that a tree keeps, and others, because torch.compile cannot trace their first use."""
        if self.state.heads_cache is not None:
            self.state.heads_cache.chain(self.longest)
        self._for_steps(False)
        self.drafter.propose(self.state.frontier())
        self._for_steps(True)

    def _for_steps(self, compiled: bool) -> None:
        for cache in self.caches:
            cache.for_steps(compiled)

    def begin(self, session: Session, root: Tensor, hidden: Tensor) -> None:
        """Decode the texts of a session, whose prompts the caches hold; for `root` and `hidden` see `State`."""
        self.sampler.begin(session.target, session.sequences)
        self.start()
        state = self.state
        state.rows = list(range(len(root)))
        state.alive.fill_(1)
        state.begin(root, hidden)

    def start(self) -> None:
        """Prepare for steps of other texts."""
        self._for_steps(True)
        self.step = None
        if isinstance(self.drafter, KeepsProducts):
            self.drafter.refresh()

    def join(self, texts: State, session: Session, places: Sequence[int]) -> None:
        """Let the texts of `session` join as `places`; its `texts` have read the prompts in caches of their own."""
        self.sampler.begin(session.target, session.sequences, len(self.state.rows))
        self.state.join(texts, places)

    def select(self, left: Sequence[int]) -> None:
        """Keep only the live rows at the places `left`, because the texts of the others have ended."""
        self.state.select(left)
        self.sampler.select(left)

    @property
    def may_miss(self) -> bool:
        """Whether the host may have to decide on tokens of the next step."""
        self._chosen()  # texts that left may have had another kind
        return self.sampler.may_miss

    def decide_by(self, kinds: Sequence[Kind]) -> None:
        """Decide by a kind that does for the live rows, which have `kinds`, from the next step on."""
        self.kind, self.step = functools.reduce(Kind.joined, kinds, kinds[0] if kinds else self.kind), None

    def end(self, unread: int = 0) -> int:
        """The slots that the next step needs, if the host has not read the results of `unread` steps."""
        return self.nodes + unread * self.longest + max(self.caches[0].lengths)

    def open(self, unread: int = 0) -> None:
        """Make room for the next step, and let it see all texts; for `unread` see `end`."""
        self._chosen()
        end = self.end(unread)
        for cache in self.caches:  # all have the same window, as a graph is recorded for one
            self._open(cache, end - max(cache.lengths))

    def _open(self, cache: TreeCache, count: int) -> None:
        cache.open(count)
        if keep_in_place(cache):
            self.forget_graphs()

    def lend(self, lengths: Sequence[int]) -> State | None:
        """Lend caches for prompts of `lengths` that join, into which a CUDA graph can `read` them; `None`: none can."""
        if self.prompts is None or len(lengths) > 1 or self.prompts.bucket(lengths) is None:
            return None
        for cache in self.reads.caches:
            cache.restart(cache.capacity or BUCKETS[-1])
        return self.reads

    def attach(self, backbone: Backbone) -> None:
        """Let another session take the region; its `backbone` is that of the region's model."""
        vars(self.backbone).update(vars(backbone))
        # `model.to` and some adapters move weights to other memory without a change of the key.
        if (now := self._addresses()) != self.addresses:
            self.forget_graphs()
            self.addresses = now

    def restart(self, capacity: int) -> None:
        """Empty the caches for the prompts of other texts, and make room for so many slots of each."""
        for cache in self.caches:
            cache.restart(capacity)

    def read(self, ids: Tensor, lengths: Sequence[int]) -> Readout | None:
        """Read prompts `ids` [B, T] by a CUDA graph; `None` if none can hold them (`PromptGraphs`)."""
        if self.prompts is None or (bucket := self.prompts.bucket(lengths)) is None:
            return None
        for cache in self.reads.caches:
            if self.reads is self.state:
                self._open(cache, bucket)
            else:
                cache.open(bucket)
                if keep_in_place(cache):
                    self.prompts.clear()
        return self.prompts(bucket, ids, lengths)

    def detach(self) -> None:
        """Keep nothing of the texts that were decoded, and no reference to the model, which may end before the code."""
        self._for_steps(False)
        vars(self.backbone).clear()

    def release(self) -> None:
        """Free the memory of the KV caches. The compiled code stays."""
        self.forget_graphs()
        for cache in self._all_caches:
            cache.release()

    def _addresses(self) -> list[int]:
        """The addresses of all parameters and buffers; of quantised ones, those of the tensors they consist of."""
        modules = [self.backbone.model, *([] if self.heads is None else [self.heads])]
        parts = [part for module in modules for part in modules_of(module)]
        states = [state for part in parts for state in (*part._parameters.values(), *part._buffers.values())]
        return [plain.data_ptr() for state in states if state is not None for plain in plain_tensors(state)]

    def forget_graphs(self) -> None:
        for graphs in (self.graphed, self.prompts):
            if graphs is not None:
                graphs.clear()

    @property
    def num_bytes(self) -> int:
        """The memory of all KV caches in bytes."""
        return sum(cache.num_bytes for cache in self._all_caches)

    @property
    def _all_caches(self) -> list[TreeCache]:
        return [*self.caches, *([] if self.reads is self.state else self.reads.caches)]


def nothing(stage: str) -> None:
    """The laps of a compiled step, which has no stages."""


def keep_in_place(cache: TreeCache) -> bool:
    """Let torch.compile know that a cache's tensors stay at their addresses, and that its numbers of slots change.

    Returns whether a buffer was new."""
    static(cache.filled)
    torch._dynamo.mark_dynamic(static(cache.window), 0)
    new = [buffer for buffer in cache.buffers if not hasattr(buffer, "_dynamo_static_input_type")]
    for buffer in new:
        torch._dynamo.mark_dynamic(static(buffer), 3)
    return bool(new)


def static(tensor: Tensor) -> Tensor:
    """Mark a tensor as one whose address never changes, so that CUDA graphs can update it in place; returns it."""
    torch._dynamo.mark_static_address(tensor)
    return tensor


def compiled(step: Callable[[], Tensor], settings: dict[str, Any]) -> Callable[[], Tensor]:
    """Compile the bound method `step` as one graph, which no other object of its class shares.

    `settings` are those of inductor, PyTorch's compiler. Only torch.compile's guards on tensors and on the sizes of
    caches and windows are kept, because guards on a thousand modules take longer than a step of a small model. Instead,
    each session checks once, by `modules_key`, that no module has changed."""
    method = cast(MethodType, step)
    function = cast(FunctionType, method.__func__)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)  # shares no compiled code
    guards: dict[str, Any] = {
        "guard_filter_fn": lambda found: [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in found]
    }
    return torch.compile(MethodType(own, method.__self__), fullgraph=True, dynamic=False, options=guards | settings)


class Regions(list[tuple[Key, Region]]):
    """The compiled regions of a model that are kept for reuse, the last used one last. `max_bytes` may be changed."""

    def __init__(self, max_bytes: int) -> None:
        """Make an empty list; the caches of all regions in it take up to `max_bytes`."""
        super().__init__()
        self.max_bytes, self.lock = max_bytes, Lock()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Regions:
        """The compiled regions kept for `model`, as long as it lives; at first an empty list."""
        with _LOCK:
            if model not in _KEPT:
                _KEPT[model] = cls(int(SHARE * total_memory(model.device)))
            return _KEPT[model]

    def take(self, key: Key) -> Region | None:
        """Remove a stored compiled region with this key and return it; `None` if no region has the key."""
        with self.lock:
            for place, (held, region) in enumerate(self):
                if held == key:
                    del self[place]
                    return region
        return None

    def put_back(self, key: Key, region: Region) -> None:
        """Store a compiled region after use.

        Of more than `KEPT` regions, the oldest ones are dropped. If the caches of all regions take more than
        `max_bytes`, those of the oldest regions are freed; their compiled code stays, and gets new caches for its next
        text."""
        with self.lock:
            self.append((key, region))
            del self[:-KEPT]
            left = self.max_bytes
            for _, held in reversed(self):
                if held.num_bytes > left:
                    held.release()
                left -= held.num_bytes


_KEPT: WeakKeyDictionary[PreTrainedModel, Regions] = WeakKeyDictionary()  # nothing is stored on a user's model
_LOCK = Lock()
