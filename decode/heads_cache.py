"""KV caches of Medusa heads that look back at the text while decoding; the caches grow only by accepted tokens.

Prefix layers between backbone and heads read every hidden state (`medusa.heads.prefix`). Heads that attend to the text
(`medusa.heads.context_kv`) keep keys and values of pairs: a hidden state and the token after it.

Shapes: B rows of the batch, T tokens of a piece of the prompts, C columns of a path, H hidden size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig

from decode.cache import TreeCache
from decode.masks import tree_masks
from decode.topology import Topology, chain
from medusa.backbone import Backbone
from medusa.heads.context_kv import AttendsToText, ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.tree_support import LayerKinds

WIDEST = 2048
"""The widest window of heads for which a compiled step copies the keys in the window, also after shorter texts."""


class HeadsCache:
    """The KV caches of Medusa heads that look back at the text, which grow together with the backbone's cache."""

    def __init__(
        self, heads: MedusaHeads, backbone: Backbone, batch_size: int, capacity: int, fixed: bool = False
    ) -> None:
        """Make empty caches; for `fixed` see `TreeCache`."""
        self.heads, self.backbone = heads, backbone
        self.dtype, self.device = heads.dtype, heads.device
        self.prefix = self.pairs = None
        self.chains: dict[int, Topology] = {}  # by the number of columns of a path
        size = batch_size, capacity, heads.device, fixed
        if heads.prefix is not None:
            self.prefix, self.layers = TreeCache(heads.prefix.config, *size), LayerKinds(heads.prefix.config)
        if isinstance(heads, AttendsToText):
            self.pairs = TreeCache(LlamaConfig(num_hidden_layers=heads.config.decoder_layers), *size)

    @property
    def caches(self) -> list[TreeCache]:
        """The caches of prefix layers, and of pairs, as far as there are any."""
        return [cache for cache in (self.prefix, self.pairs) if cache is not None]

    def piece(self, hidden: Tensor, next_ids: Tensor) -> Tensor:
        """Append a piece of each right-padded prompt to the caches, from the backbone's hidden states [B, T, E].

        E is H times the number of layers that the heads read. Returns what the heads read [B, T, H]. `next_ids` [B, T]
        is the token after each of the T positions of the piece; from the last token of each prompt on, it may be any
        value, because `cut` drops these pairs. Counts the piece, unlike `path`."""
        hidden = self.heads.join(hidden.to(self.device, self.dtype))
        counts = torch.full((len(hidden),), hidden.shape[1], device=self.device)
        if self.prefix is not None:
            hidden = self._read(self.prefix, hidden, counts)
        if self.pairs is not None:
            self._append(self.pairs, hidden, next_ids, counts)
        self.count([hidden.shape[1]] * len(hidden))
        return hidden

    def path(self, before: Tensor, hidden: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        """Append B rows' accepted paths to the caches; returns the heads' input [B, H] at the paths' last nodes.

        `before` [B, H] are the hidden states that the heads read at the token before the root. `hidden` [B, C, E] and
        `ids` [B, C] are those of the C path nodes, the root first; `counts[b]` is the number of nodes of path b, 0 for
        a row that does not grow, whose result has no meaning. The host calls `count` when it knows them."""
        hidden, counts = self.heads.join(hidden.to(self.device, self.dtype)), counts.to(self.device)
        if self.prefix is not None:
            hidden = self._read(self.prefix, hidden, counts)
        if self.pairs is not None:
            pairs = torch.cat([before[:, None].to(hidden), hidden[:, :-1]], dim=1)
            self._append(self.pairs, pairs, ids, counts)
        last = (counts - 1).clamp_min(0)[:, None, None]
        return hidden.gather(1, last.expand(-1, -1, hidden.shape[-1]))[:, 0]

    def _read(self, cache: TreeCache, hidden: Tensor, counts: Tensor) -> Tensor:
        """Run the prefix layers (decoder layers between backbone and heads) over `hidden` [B, T, H] of T tokens."""
        assert self.heads.prefix is not None
        positions = self._appended(cache, hidden)
        masks = tree_masks(self.layers, self.dtype, self.chain(hidden.shape[1]), cache.filled, cache.width)
        out = self.heads.prefix(hidden, positions, masks, cache)
        cache.commit(None, counts)
        return out

    def _append(self, cache: TreeCache, hidden: Tensor, next_ids: Tensor, counts: Tensor) -> None:
        """Append the KV of T pairs (hidden state, next token) to each row; row b keeps the first `counts[b]` pairs."""
        assert isinstance(self.heads, AttendsToText)
        token = self.heads.embed(next_ids, self.backbone.embed)
        self.heads.project_kv(hidden, token, self._appended(cache, hidden), cache.update)
        cache.commit(None, counts)

    def _appended(self, cache: TreeCache, hidden: Tensor) -> Tensor:
        """Reserve slots for `hidden` [B, T, H]; returns their positions [B, T]."""
        if not cache.is_compiled:  # else the host has opened it before the step
            cache.open(hidden.shape[1])
        return cache.append(hidden.shape[1])

    def chain(self, columns: int) -> Topology:
        """The topology of a path of so many `columns`; torch.compile cannot trace the first call."""
        if columns not in self.chains:
            self.chains[columns] = chain(columns, self.device)
        return self.chains[columns]

    def count(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Tell how many nodes were committed; see `TreeCache.count`."""
        for cache in self.caches:
            cache.count(counts, rows)

    def cut(self, lengths: Sequence[int]) -> None:
        """Shorten each row b of the caches to its first `lengths[b]` tokens, because the later tokens were padding."""
        if self.prefix is not None:
            self.prefix.cut(lengths)
        if self.pairs is not None:
            self.pairs.cut([length - 1 for length in lengths])

    def context_kv(self) -> ContextKV | None:
        """The keys and values of the text for the next guesses; `None` for heads that do not attend to the text."""
        cache = self.pairs
        if cache is None:
            return None
        assert isinstance(self.heads, AttendsToText)
        if cache.is_compiled:
            widest = WIDEST
        else:
            cache.open(0)
            widest = cache.longest - 1
        window = self.heads.window
        last = None if window is None or window > widest else window
        return self.heads.after_text([layer.read() for layer in cache.tree_layers], cache.filled, last)
