"""Caches of heads that look back at the text while decoding; the caches grow only by accepted tokens.

Prefix layers read every hidden state (`medusa.heads.prefix`). Heads that attend to the text keep keys and values of
pairs: a hidden state with the token after it, at all positions except the last, whose next token is the root
(`medusa.heads.context_kv`).

Shapes: B rows, T tokens of a piece of the prompts, C columns of a path, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.cache import TreeCache
from decode.masks import TreeMasks
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.heads.prefix import Prefix
from medusa.tree import Tree


class HeadsCache:
    """The KV caches of heads that read the text, which grow together with the backbone's cache."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int) -> None:
        self.heads, self.backbone = heads, backbone
        self.dtype, self.device = heads.dtype, heads.device
        self.prefix = None if heads.prefix is None else PrefixCache(heads.prefix, batch_size, capacity)
        self.pairs = None
        if heads.uses_context:
            self.pairs = PairCache(heads, backbone, batch_size, capacity)

    @classmethod
    def of(cls, heads: MedusaHeads | None, backbone: Backbone, batch_size: int, capacity: int) -> HeadsCache | None:
        """Make the cache that `heads` need; `None` for heads that read only the current hidden state."""
        if heads is None or not (heads.prefix is not None or heads.uses_context):
            return None
        return cls(heads, backbone, batch_size, capacity)

    def piece(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Append a piece of each prompt to the caches; returns the hidden states that the heads read [B, T, H].

        Args:
            hidden: [B, T, H] the backbone's hidden states of right-padded prompts.
            next_ids: [B, T] the token after each position; any value where a prompt has ended.
        """
        hidden = hidden.to(self.device, self.dtype)
        if self.prefix is not None:
            hidden = self.prefix.piece(hidden)
        if self.pairs is not None:
            self.pairs.append(hidden, next_ids, [hidden.shape[1]] * len(hidden))
        return hidden

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, counts: list[int]) -> Tensor:
        """Append accepted paths to the caches; returns the hidden states that the heads read at the paths' ends [B, H].

        Args:
            before: [B, H] the hidden states that the heads read before the root.
            hidden: [B, C, H] the backbone's hidden states at the paths' nodes, the root first.
            ids: [B, C] the tokens of these nodes.
            counts: the number of nodes of each path.
        """
        hidden = hidden.to(self.device, self.dtype)
        if self.prefix is not None:
            hidden = self.prefix.path(hidden, counts)
        if self.pairs is not None:
            self.pairs.append(torch.cat([before[:, None].to(hidden), hidden[:, :-1]], dim=1), ids, counts)
        end = torch.tensor(counts, device=self.device) - 1
        return hidden[torch.arange(len(hidden), device=self.device), end]

    def cut(self, lengths: list[int]) -> None:
        """Shorten each row of the caches to its first `lengths` tokens, because the tokens after them were padding."""
        if self.prefix is not None:
            self.prefix.cache.cut(lengths)
        if self.pairs is not None:
            self.pairs.cache.cut([length - 1 for length in lengths])

    def select(self, rows: list[int]) -> None:
        """Keep only the rows `rows` of the batch in all caches."""
        for part in (self.prefix, self.pairs):
            if part is not None:
                part.cache.select(rows)

    def context_kv(self) -> ContextKV | None:
        """The keys and values of the text, to which the heads attend; `None` for heads that do not attend to it."""
        return None if self.pairs is None else self.pairs.context_kv()


class PrefixCache:
    """The prefix layers of heads (decoder layers between backbone and heads) with their KV cache."""

    def __init__(self, prefix: Prefix, batch_size: int, capacity: int) -> None:
        example = next(prefix.parameters())
        self.prefix, self.device = prefix, example.device
        self.cache = TreeCache(prefix.config, batch_size, capacity)
        self.masks = TreeMasks(prefix.config, example.dtype, example.device)
        self.chains: dict[int, Topology] = {}

    def piece(self, hidden: Tensor) -> Tensor:
        """Run the prefix layers over a piece [B, T, H] of all prompts; returns their output [B, T, H]."""
        start, count = self.cache.longest, hidden.shape[1]
        positions = torch.arange(start, start + count, device=self.device).expand(len(hidden), -1)
        seen = torch.ones(count, start + count, dtype=torch.bool, device=self.device).tril(start)
        out = self.prefix(hidden, positions, seen[None, None], self.cache)
        self.cache.commit_prompt([count] * len(hidden))
        return out

    def path(self, hidden: Tensor, counts: list[int]) -> Tensor:
        """Run the prefix layers over accepted paths [B, C, H] with `counts` nodes; returns their output [B, C, H]."""
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
    """A KV cache of pairs (hidden state, token after it), one for each position of the text except the last."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int) -> None:
        self.heads, self.backbone = heads, backbone
        self.cache = TreeCache(LlamaConfig(num_hidden_layers=1), batch_size, capacity)

    def append(self, hidden: Tensor, next_ids: Tensor, counts: list[int]) -> None:
        """Append pairs of hidden [B, T, H] and next tokens [B, T]; each row keeps its first `counts` pairs."""
        cache, token = self.cache, self.backbone.embed(next_ids).to(hidden)
        start = torch.tensor(cache.lengths, device=hidden.device)[:, None]
        positions = start + torch.arange(hidden.shape[1], device=hidden.device)
        cache.update(*self.heads.project_kv(hidden, token, positions), 0)
        cache.commit_prompt(counts)

    def context_kv(self) -> ContextKV:
        """The keys and values of all pairs, for heads at the positions after the text."""
        cache, layer = self.cache, self.cache.tree_layers[0]
        lengths = torch.tensor(cache.lengths, device=layer.keys.device)[:, None]  # [B, 1]
        seen = torch.arange(cache.longest, device=lengths.device) < lengths
        keys, values = (states[:, :, : cache.longest] for states in (layer.keys, layer.values))
        return ContextKV(keys, values, seen[:, None], lengths, self.heads.config.num_heads)
