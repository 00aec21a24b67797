"""KV caches of Medusa heads that look back at the text while decoding; the caches grow only by accepted tokens.

Prefix layers between backbone and heads read every hidden state (`medusa.heads.prefix`). Heads that attend to the text
(`medusa.heads.context_kv`) keep keys and values of pairs: a hidden state and the token after it.

Shapes: B rows of the batch, T tokens of a piece of the prompts, C columns of a path, H hidden size."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.cache import TreeCache
from decode.masks import TreeMasks
from decode.ops.transfer import on_device
from decode.topology import chain
from medusa.backbone import Backbone
from medusa.heads.context_kv import AttendsToText, ContextKV
from medusa.heads.independent import MedusaHeads


class HeadsCache:
    """The KV caches of Medusa heads that look back at the text, which grow together with the backbone's cache."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int) -> None:
        self.heads, self.backbone = heads, backbone
        self.dtype, self.device = heads.dtype, heads.device
        self.prefix = self.pairs = None
        if heads.prefix is not None:
            self.prefix = TreeCache(heads.prefix.config, batch_size, capacity)
            self.masks = TreeMasks(heads.prefix.config, heads.dtype, heads.device)
        if isinstance(heads, AttendsToText):
            self.pairs = TreeCache(LlamaConfig(num_hidden_layers=heads.config.decoder_layers), batch_size, capacity)

    def piece(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Append a piece of each right-padded prompt to the caches, from the backbone's hidden states [B, T, H].

        Returns the hidden states that the heads read [B, T, H]. `next_ids` [B, T] is the token after each of the T
        positions of the piece; where a prompt has ended, it may be any value."""
        hidden = self.heads.join(hidden.to(self.device, self.dtype))
        rows, count = hidden.shape[:2]
        if self.prefix is not None:
            start = self.prefix.longest
            positions = torch.arange(start, start + count, device=self.device).expand(rows, -1)
            seen = torch.ones(count, start + count, dtype=torch.bool, device=self.device).tril(start)
            hidden = self._read(self.prefix, hidden, positions, seen[None, None], [count] * rows)
        if self.pairs is not None:
            self._append(self.pairs, hidden, next_ids, [count] * rows)
        return hidden

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, counts: list[int]) -> Tensor:
        """Append B rows' accepted paths to the caches; returns the heads' input [B, H] at the paths' last nodes.

        `before` [B, H] are the hidden states that the heads read at the token before the root. `hidden` [B, C, H] and
        `ids` [B, C] are those of the C path nodes, the root first; `counts[b]` is the number of nodes of path b."""
        hidden = self.heads.join(hidden.to(self.device, self.dtype))
        if self.prefix is not None:
            topology, lengths = chain(hidden.shape[1], self.device), self.prefix.lengths
            positions = on_device(lengths, self.device)[:, None] + topology.depth
            mask = self.masks(lengths, topology)
            assert isinstance(mask, Tensor)
            hidden = self._read(self.prefix, hidden, positions, mask, counts)
        if self.pairs is not None:
            pairs = torch.cat([before[:, None].to(hidden), hidden[:, :-1]], dim=1)
            self._append(self.pairs, pairs, ids, counts)
        return hidden[torch.arange(len(hidden), device=self.device), on_device(counts, self.device) - 1]

    def _read(self, cache: TreeCache, hidden: Tensor, positions: Tensor, mask: Tensor, counts: list[int]) -> Tensor:
        """Run the prefix layers (decoder layers between backbone and heads) over `hidden` [B, T, H] of T tokens."""
        assert self.heads.prefix is not None
        out = self.heads.prefix(hidden, positions, mask, cache)
        cache.commit_prompt(counts)
        return out

    def _append(self, cache: TreeCache, hidden: Tensor, next_ids: Tensor, counts: list[int]) -> None:
        """Append the KV of T pairs (hidden state, next token) to each row; row b keeps the first `counts[b]` pairs."""
        assert isinstance(self.heads, AttendsToText)
        token = self.heads.embed(next_ids, self.backbone.embed)
        start = on_device(cache.lengths, hidden.device)[:, None]
        positions = start + torch.arange(hidden.shape[1], device=hidden.device)
        self.heads.project_kv(hidden, token, positions, cache.update)
        cache.commit_prompt(counts)

    def cut(self, lengths: list[int]) -> None:
        """Shorten each row b of the caches to its first `lengths[b]` tokens, because the later tokens were padding."""
        if self.prefix is not None:
            self.prefix.cut(lengths)
        if self.pairs is not None:
            self.pairs.cut([length - 1 for length in lengths])

    def select(self, rows: list[int]) -> None:
        """Keep only the rows with the indices `rows` in all caches."""
        for cache in (self.prefix, self.pairs):
            if cache is not None:
                cache.select(rows)

    def join(self, other: HeadsCache) -> None:
        """Append the rows of another cache of the same heads."""
        for mine, theirs in ((self.prefix, other.prefix), (self.pairs, other.pairs)):
            if mine is not None and theirs is not None:
                mine.join(theirs)

    def context_kv(self) -> ContextKV | None:
        """The keys and values of the text for the next guesses; `None` for heads that do not attend to the text."""
        if self.pairs is None:
            return None
        assert isinstance(self.heads, AttendsToText)
        cache, longest, window = self.pairs, self.pairs.longest, self.heads.window
        kv = [(layer.keys[:, :, :longest], layer.values[:, :, :longest]) for layer in cache.tree_layers]
        last = None if window is None or longest <= window else window
        return self.heads.after_text(kv, on_device(cache.lengths, self.device), last)
