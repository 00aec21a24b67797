"""One compiled step with its state on the device.

Shapes: B rows, N nodes, D the depth, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import cast

import torch
from torch import Tensor

from decode.accept import Acceptance
from decode.compiled.fixed_cache import FixedCache, static
from decode.compiled.fixed_heads_cache import FixedHeadsCache
from decode.compiled.sampler import FixedSampler
from decode.draft import Draft, Drafter, Frontier
from decode.loop import at_end, pack
from decode.masks import LayerKind, LayerKinds, Mask, additive, visible_slots
from decode.ops.grouped_attention import grouped
from decode.session import Session
from decode.topology import Topology
from medusa.backbone import Backbone


class Region:
    """The compiled step for one batch size, capacity, tree and sampler."""

    def __init__(
        self,
        backbone: Backbone,
        cache: FixedCache,
        heads_cache: FixedHeadsCache | None,
        drafter: Drafter,
        sampler: FixedSampler,
        hidden: Tensor,
    ) -> None:
        """`hidden` [B, H] has the shape and dtype of the hidden states that the drafter starts from."""
        self.backbone, self.cache, self.heads_cache = backbone, cache, heads_cache
        self.drafter, self.sampler = drafter, sampler
        self.config, self.layers = backbone.config, LayerKinds(backbone.config)
        device, rows = backbone.device, cache.rows
        self.root = static(torch.zeros(rows, dtype=torch.long, device=device))
        self.hidden = static(torch.zeros_like(hidden))
        self.alive = static(torch.ones(rows, dtype=torch.long, device=device))  # 0 for rows that have ended
        self.end = min(end for end in (backbone.context, cache.capacity) if end is not None)
        first = drafter.propose(self._frontier())
        _ = first.topology.non_ancestors  # cached here, because caching it is no part of a step
        self.compiled = compiled(self._step, device)

    def __call__(self, u: Tensor) -> list[list[int]]:
        """Run a step with numbers u [B, D + 1]; returns per row what `decode.loop.unpack` takes."""
        with grouped(self.config), self.backbone.watched():
            packed: Tensor = self.compiled(u)
        return packed.tolist()

    def _frontier(self) -> Frontier:
        context_kv = None if self.heads_cache is None else self.heads_cache.context_kv()
        return Frontier(self.root, self.hidden, list(range(self.cache.rows)), context_kv)

    def _step(self, u: Tensor) -> Tensor:
        cache, lengths = self.cache, self.cache.lengths
        draft = self.drafter.propose(self._frontier())
        topology = draft.topology
        positions = (lengths[:, None] + topology.depth).clamp_max(self.end - 1)
        cache.append_next(topology.num_nodes)
        readout = self.backbone.forward(
            draft.ids, cache, position_ids=positions, attention_mask=self._masks(topology, lengths)
        )
        accepted = self.sampler.accept(draft, readout.logits, u, self.end - 1 - lengths)
        if topology.max_children > 1:
            cache.move(accepted.path.clamp_min(0))
        packed, counts = pack(draft, accepted), accepted.length * self.alive  # rows that have ended do not grow
        self.hidden.copy_(self._heads_read(draft, readout.hidden, accepted, counts))
        self.root.copy_(accepted.next_root)
        lengths.add_(counts)
        return packed

    def _heads_read(self, draft: Draft, hidden: Tensor, accepted: Acceptance, counts: Tensor) -> Tensor:
        """The hidden states [B, H] from which the heads start the next step, of a step's hidden [B, N, H]."""
        if self.heads_cache is None:
            return at_end(hidden, accepted)
        path = accepted.path.clamp_min(0)
        states = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[-1])).to(self.hidden.dtype)
        return self.heads_cache.path(self.hidden, states, draft.ids.gather(1, path), accepted.length - 1, counts)

    def _masks(self, topology: Topology, lengths: Tensor) -> Mask:
        def of_kind(kind: LayerKind) -> Tensor:
            return additive(visible_slots(topology, lengths, self.cache.capacity, kind), self.backbone.dtype)[:, None]

        return self.layers.masks(of_kind)

    def load(self, session: Session, frontier: Frontier) -> None:
        """Start after prompts that were read; the session's own caches are freed."""
        self.cache.load(session.verifier.cache)
        session.verifier.cache.release()
        if self.heads_cache is not None and session.heads_cache is not None:
            self.heads_cache.load(session.heads_cache)
        self.root.copy_(frontier.root)
        self.hidden.copy_(frontier.hidden)
        self.alive.fill_(1)

    def take(self, other: Region) -> None:
        """Continue from a region with a smaller cache."""
        self.cache.take(other.cache)
        if self.heads_cache is not None and other.heads_cache is not None:
            self.heads_cache.take(other.heads_cache)
        self.root.copy_(other.root)
        self.hidden.copy_(other.hidden)
        self.alive.copy_(other.alive)

    def end_rows(self, alive: Sequence[bool]) -> None:
        """End the rows that are not `alive`; they stay in the batch, whose shape is fixed, and do nothing."""
        self.alive.copy_(torch.tensor(alive))


def compiled(step: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """Compile a bound method whole, and for its object alone: no other object tries the compiled code.

    Only the guards on tensors stay. Everything else that a region depends on is in its key. Checking a thousand modules
    in every step would take longer than a small model's step; once per session it does not matter (`regions.state`).
    """
    method = cast(MethodType, step)
    function = cast(FunctionType, method.__func__)
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    options: dict[str, object] = {
        "guard_filter_fn": partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=True),
        # Torch 2.13 may write a result into part of a finished `cat`, and still reuse all of that memory. A recurrent
        # head then read the next token's embedding instead of its state.
        "inplace_buffers": False,
    }
    if device.type == "cuda":
        options["triton.cudagraphs"] = True
    bound = MethodType(own, method.__self__)
    return torch.compile(bound, fullgraph=True, dynamic=False, options=options)  # type: ignore[arg-type]
