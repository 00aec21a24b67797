"""Heads with prefix attention in decoding: their layers read what the backbone said, and only what was accepted.

Shapes: B rows, T tokens of a piece of the prompts, C columns of a path, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decode.cache import TreeCache
from decode.topology import Topology
from decode.verify import TreeMasks
from medusa.heads import MedusaHeads
from medusa.tree import Tree


class PrefixReader:
    """The prefix layers' cache, in step with the backbone's."""

    def __init__(self, heads: MedusaHeads, batch_size: int, capacity: int) -> None:
        assert heads.prefix is not None, "these heads read the backbone's hidden states as they are"
        example = next(heads.parameters())
        self.prefix, self.dtype, self.device = heads.prefix, example.dtype, example.device
        self.cache = TreeCache(self.prefix.config, batch_size, capacity)
        self.masks = TreeMasks(self.prefix.config, self.dtype, self.device)
        self.chains: dict[int, Topology] = {}

    def piece(self, hidden: Tensor) -> Tensor:
        """hidden [B, T, H] of the next tokens of all prompts, right-padded -> what the heads read [B, T, H]."""
        start, count = self.cache.longest, hidden.shape[1]
        positions = torch.arange(start, start + count, device=self.device).expand(len(hidden), -1)
        seen = torch.ones(count, start + count, dtype=torch.bool, device=self.device).tril(start)
        out = self.prefix(hidden.to(self.device, self.dtype), positions, seen[None, None], self.cache)
        self.cache.commit_prompt([count] * len(hidden))
        return out

    def path(self, hidden: Tensor, counts: list[int]) -> Tensor:
        """hidden [B, C, H] of accepted paths, `counts[b]` nodes long -> what the heads read at their ends [B, H]."""
        width, lengths = hidden.shape[1], self.cache.lengths
        if width not in self.chains:
            self.chains[width] = Topology.of(Tree.chain(width - 1).to(self.device))
        topology = self.chains[width]
        positions = torch.tensor(lengths, device=self.device)[:, None] + topology.depth
        mask = self.masks(lengths, topology)
        assert isinstance(mask, Tensor)
        out = self.prefix(hidden.to(self.device, self.dtype), positions, mask, self.cache)
        self.cache.commit_prompt(counts)
        end = torch.tensor(counts, device=self.device) - 1
        return out[torch.arange(len(out), device=self.device), end]
