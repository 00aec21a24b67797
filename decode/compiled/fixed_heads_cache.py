"""The heads' own caches (`decode.heads_cache`) in fixed shapes, for compiled steps.

Shapes: B rows, H hidden size, D the tree's depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.compiled.fixed_cache import FixedCache
from decode.heads_cache import HeadsCache
from decode.masks import additive, visible_slots
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree


class FixedHeadsCache:
    """What heads that look back keep of the text, at fixed addresses."""

    heads: MedusaHeads
    backbone: Backbone
    prefix: FixedCache | None
    pairs: FixedCache | None

    def __init__(self, like: HeadsCache | FixedHeadsCache, capacity: int, max_depth: int) -> None:
        """An empty cache for the heads of `like`; `max_depth` is that of the tree whose paths are read."""
        self.heads, self.backbone = like.heads, like.backbone
        self.chain = Topology.of(Tree.chain(max_depth).to(like.backbone.device))
        prefix, pairs = _caches(like)
        self.prefix = None if prefix is None else FixedCache(prefix, capacity)
        self.pairs = None if pairs is None else FixedCache(pairs, capacity)

    def load(self, heads_cache: HeadsCache) -> None:
        """Copy what was read of the prompts, and free its memory."""
        for mine, source in ((self.prefix, heads_cache.prefix), (self.pairs, heads_cache.pairs)):
            if mine is not None and source is not None:
                mine.load(source.cache)
                source.cache.release()

    def take(self, other: FixedHeadsCache) -> None:
        """Copy everything from a smaller cache."""
        for mine, source in ((self.prefix, other.prefix), (self.pairs, other.pairs)):
            if mine is not None and source is not None:
                mine.take(source)

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, end: Tensor, counts: Tensor) -> Tensor:
        """Append accepted paths; returns what the heads read at their ends [B, H].

        Args:
            before: [B, H] what the heads read before the root.
            hidden, ids: [B, D + 1, H], [B, D + 1] of the paths' nodes, padded with anything.
            end: [B] where each path ends.
            counts: [B] by how many nodes each row grows.
        """
        if self.prefix is not None:
            assert self.heads.prefix is not None
            cache = self.prefix
            positions = cache.append_next(hidden.shape[1])
            allowed = visible_slots(self.chain, cache.lengths, cache.capacity)[:, None]
            hidden = self.heads.prefix(hidden, positions, additive(allowed, hidden.dtype), cache)
            cache.lengths.add_(counts)
        if self.pairs is not None:
            cache = self.pairs
            positions = cache.append_next(hidden.shape[1])
            pairs = torch.cat([before[:, None], hidden[:, :-1]], dim=1)
            cache.update(*self.heads.project_kv(pairs, self.backbone.embed(ids).to(hidden), positions), 0)
            cache.lengths.add_(counts)
        return hidden.gather(1, end[:, None, None].expand(-1, -1, hidden.shape[-1]))[:, 0]

    def context_kv(self) -> ContextKV | None:
        """The keys and values that the next draft looks back at; `None` for kinds that do not look back."""
        if self.pairs is None:
            return None
        layer, lengths = self.pairs.fixed_layers[0], self.pairs.lengths[:, None]
        seen = torch.arange(self.pairs.capacity, device=lengths.device) < lengths
        return ContextKV(layer.keys, layer.values, seen[:, None], lengths, self.heads.config.num_heads)


def _caches(like: HeadsCache | FixedHeadsCache) -> tuple[TreeCache | FixedCache | None, TreeCache | FixedCache | None]:
    """The caches of the prefix layers and of the pairs, in either form."""
    if isinstance(like, FixedHeadsCache):
        return like.prefix, like.pairs
    return (
        None if like.prefix is None else like.prefix.cache,
        None if like.pairs is None else like.pairs.cache,
    )
