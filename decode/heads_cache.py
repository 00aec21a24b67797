"""Heads that look back, in decoding: what they keep of a text grows with it, and only by what was accepted.

Prefix layers read every hidden state (`medusa.heads.prefix`); heads that look back keep keys and values of the pairs
(hidden state, token behind it) of all positions but the last, whose next token is the root (`medusa.heads.context_kv`).

Shapes: B rows, T tokens of a piece of the prompts, C columns of a path, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.cache import TreeCache
from decode.topology import Topology
from decode.verify import TreeMasks
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.prefix import Prefix
from medusa.tree import Tree


class HeadsCache:
    """Caches of the heads' own, in step with the backbone's."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int) -> None:
        self.heads, self.backbone = heads, backbone
        self.dtype, self.device = heads.dtype, heads.device
        self.prefix = None if heads.prefix is None else PrefixCache(heads.prefix, batch_size, capacity)
        self.pairs = None
        if heads.uses_context:
            self.pairs = PairCache(heads, backbone, batch_size, capacity)

    @classmethod
    def of(cls, heads: MedusaHeads | None, backbone: Backbone, batch_size: int, capacity: int) -> HeadsCache | None:
        """`None` where heads take what the backbone says now, and nothing else."""
        if heads is None or not (heads.prefix is not None or heads.uses_context):
            return None
        return cls(heads, backbone, batch_size, capacity)

    def piece(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """hidden [B, T, H] of the next tokens of all prompts, right-padded -> what the heads read [B, T, H].

        `next_ids` [B, T]: the tokens behind; anything where a prompt has ended.
        """
        hidden = hidden.to(self.device, self.dtype)
        if self.prefix is not None:
            hidden = self.prefix.piece(hidden)
        if self.pairs is not None:
            self.pairs.append(hidden, next_ids, [hidden.shape[1]] * len(hidden))
        return hidden

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, counts: list[int]) -> Tensor:
        """What the heads read at the ends of accepted paths [B, H].

        Args:
            before: [B, H] what they read before the root.
            hidden, ids: [B, C, H], [B, C] of the paths' nodes, the root first.
            counts: nodes of each path.
        """
        hidden = hidden.to(self.device, self.dtype)
        if self.prefix is not None:
            hidden = self.prefix.path(hidden, counts)
        if self.pairs is not None:
            self.pairs.append(torch.cat([before[:, None].to(hidden), hidden[:, :-1]], dim=1), ids, counts)
        end = torch.tensor(counts, device=self.device) - 1
        return hidden[torch.arange(len(hidden), device=self.device), end]

    def cut(self, lengths: list[int]) -> None:
        """Rows have so many tokens, and what was read behind them was padding."""
        if self.prefix is not None:
            self.prefix.cache.cut(lengths)
        if self.pairs is not None:
            self.pairs.cache.cut([length - 1 for length in lengths])

    def select(self, rows: list[int]) -> None:
        """Keep only these rows."""
        for part in (self.prefix, self.pairs):
            if part is not None:
                part.cache.select(rows)

    def context_kv(self) -> ContextKV | None:
        """What the next step looks back at."""
        return None if self.pairs is None else self.pairs.context_kv()


class PrefixCache:
    """The prefix layers with their cache."""

    def __init__(self, prefix: Prefix, batch_size: int, capacity: int) -> None:
        example = next(prefix.parameters())
        self.prefix, self.device = prefix, example.device
        self.cache = TreeCache(prefix.config, batch_size, capacity)
        self.masks = TreeMasks(prefix.config, example.dtype, example.device)
        self.chains: dict[int, Topology] = {}

    def piece(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, H] of the next tokens of all prompts -> what the heads read [B, T, H]."""
        start, count = self.cache.longest, hidden.shape[1]
        positions = torch.arange(start, start + count, device=self.device).expand(len(hidden), -1)
        seen = torch.ones(count, start + count, dtype=torch.bool, device=self.device).tril(start)
        out = self.prefix(hidden, positions, seen[None, None], self.cache)
        self.cache.commit_prompt([count] * len(hidden))
        return out

    def path(self, hidden: Tensor, counts: list[int]) -> Tensor:
        """hidden [B, C, H] of accepted paths, `counts[b]` nodes long -> what the heads read there [B, C, H]."""
        width, lengths = hidden.shape[1], self.cache.lengths
        if width not in self.chains:
            self.chains[width] = Topology.of(Tree.chain(width - 1).to(self.device))
        topology = self.chains[width]
        positions = torch.tensor(lengths, device=self.device)[:, None] + topology.depth
        mask = self.masks(lengths, topology)
        assert isinstance(mask, Tensor)
        out = self.prefix(hidden, positions, mask, self.cache)
        self.cache.commit_prompt(counts)
        return out


class PairCache:
    """Keys and values of the pairs that heads project_kv."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int) -> None:
        self.heads, self.backbone = heads, backbone
        self.cache = TreeCache(LlamaConfig(num_hidden_layers=1), batch_size, capacity)

    def append(self, hidden: Tensor, next_ids: Tensor, counts: list[int]) -> None:
        """Pairs of hidden [B, T, H] and the tokens behind it [B, T], of which row b keeps the first `counts[b]`."""
        cache, token = self.cache, self.backbone.embed(next_ids).to(hidden)
        start = torch.tensor(cache.lengths, device=hidden.device)[:, None]
        positions = start + torch.arange(hidden.shape[1], device=hidden.device)
        cache.update(*self.heads.project_kv(hidden, token, positions), 0)
        cache.commit_prompt(counts)

    def context_kv(self) -> ContextKV:
        """All pairs, for queries at the positions behind them."""
        cache, layer = self.cache, self.cache.tree_layers[0]
        lengths = torch.tensor(cache.lengths, device=layer.keys.device)[:, None]  # [B, 1]
        seen = torch.arange(cache.longest, device=lengths.device) < lengths
        keys, values = (states[:, :, : cache.longest] for states in (layer.keys, layer.values))
        return ContextKV(keys, values, seen[:, None], lengths, self.heads.config.num_heads)
