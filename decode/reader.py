"""The reader: every forward of a model that decoding makes, on top of the texts in its KV cache.

It reads prompts piece by piece, so that memory holds the activations of one piece only, and drafts in one forward. A
piece of C tokens attends to all slots up to its own end, so the largest mask is [C, S], never [S, S], and the LM head
runs at one position per row.

Shapes: B rows of the batch, T tokens of the longest prompt, C tokens of a piece, N nodes of a draft, H hidden size,
V vocabulary, S cache slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.cache import TreeCache
from decode.draft import Draft
from decode.masks import after_text, tree_masks
from decode.ops.fast_linear import fast_linear, prepare_linear
from decode.ops.grouped_attention import grouped
from decode.ops.transfer import on_device
from decode.sequences import Sequences
from decode.topology import Topology
from medusa.backbone import Backbone, Readout, at
from medusa.tree_support import LayerKinds, Mask

PIECE_TOKENS, MIN_PIECE_ROW = 1024, 256
"""Tokens of a piece in all rows together, and the fewest in each row. Larger pieces gain nothing (measured at 8192
tokens, 6 layers of width 288, float32)."""
OnHidden = Callable[[Tensor, Tensor, int], Tensor]
"""(hidden states [B, C, H] of a piece, the token after each [B, C], the piece's first position) -> the hidden states
[B, C, H] to use instead."""


class Reader:
    """Reads prompts and drafts with a backbone, and manages the KV cache of a session's texts."""

    def __init__(self, backbone: Backbone, cache: TreeCache, sequences: Sequences | None = None) -> None:
        """Make a reader on `cache`; `sequences` holds the texts, for models that read a text again (`_reread`)."""
        self.backbone, self.cache, self.sequences = backbone, cache, sequences
        self.layers = LayerKinds(backbone.config)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        masks: Mask | None = None,
        last: Tensor | None = None,
        all_hidden: bool = False,
    ) -> Readout:
        """Run the model on tokens `ids` [B, N], which are written to the slots that `TreeCache.append` has reserved.

        `positions` are [B or 1, N], and `masks` [B, 1, N, S]; `None` is a causal mask. The rest: `Backbone.forward`."""
        kwargs = {"position_ids": positions.expand(len(ids), -1), "attention_mask": masks}
        with grouped(self.backbone.config, masks), fast_linear(self.backbone.head_weight, ids.numel()):
            return self.backbone.forward(ids, self.cache, last, all_hidden, **kwargs)

    def prefill(self, ids: Tensor, lengths: Sequence[int], on_hidden: OnHidden | None = None) -> Readout:
        """Read prompts `ids` [B, T] into the empty cache in pieces; row b has `lengths[b]` tokens, padded on the right.

        A causal model does not see padding after a token. `on_hidden` receives each piece's hidden states and returns
        those to use instead. Returns the last hidden state of each prompt [B, H] and the logits after it [B, V]."""
        (count, device), longest, boundary = (len(ids), ids.device), max(lengths), self.backbone.rope_boundary
        size = max(PIECE_TOKENS // count, MIN_PIECE_ROW)
        last = on_device(lengths, device) - 1
        next_ids = F.pad(ids[:, 1:], (0, 1))
        found: Readout | None = None
        for start in range(0, longest, size):
            end = min(start + size, longest)
            piece, positions = ids[:, start:end], torch.arange(start, end, device=device)
            if boundary is not None and end <= boundary < longest:
                # longrope rotates a forward by its longest position, and this text's lies beyond the boundary. One more
                # token carries that position; no other token sees it, and its slot is overwritten.
                piece = torch.cat([piece, piece[:, -1:]], dim=1)
                positions = torch.cat([positions, positions.new_tensor([longest - 1])])
            final = (last - start).clamp(0, end - start - 1)
            self.cache.open(piece.shape[1])
            self.cache.append(piece.shape[1])
            here = self.forward(piece, positions[None], last=final, all_hidden=on_hidden is not None)
            if on_hidden is not None:
                hidden = on_hidden(here.hidden[:, : end - start], next_ids[:, start:end], start)
                here = here._replace(hidden=at(hidden, final))
            self.cache.keep([end - start] * count)
            if found is None:
                found = here
            else:  # rows that ended in an earlier piece keep its readout
                goes_on = (last >= start)[:, None].to(here.hidden.device)
                found = Readout(*(torch.where(goes_on, new, old) for new, old in zip(here, found, strict=True)))
        assert found is not None, "an empty prompt is refused before"
        self.cache.cut(lengths)
        return found

    def __call__(self, draft: Draft) -> Readout:
        """Read a draft and its side branches; returns hidden states [B, N, H] and logits [B, N, V] of N draft nodes.

        Side branches only help later drafts. The KV cache holds all nodes until `commit` keeps accepted draft nodes."""
        if not draft.side_branches:
            return self.read(draft)
        counts = [branch.topology.num_nodes - 1 for branch in draft.side_branches]
        hidden, logits = self.read(draft.whole)
        own, *others = logits.split([draft.topology.num_nodes, *counts], dim=1)
        for branch, after in zip(draft.side_branches, others, strict=True):
            branch.on_logits(after)
        return Readout(hidden[:, : own.shape[1]], own)

    def read(self, draft: Draft, last: Tensor | None = None) -> Readout:
        """Run one forward over a draft's nodes (no side branches); returns their hidden states and logits.

        With `last` [B], only those of one node of each row, [B, H] and [B, V]."""
        cache, topology = self.cache, draft.topology
        if not cache.is_compiled:
            self._reread()
            cache.open(topology.num_nodes)
        cache.append(topology.num_nodes)
        # Nodes beyond the end are never accepted (`depth_limit`), but must not ask for a position there either.
        end = self._end(topology)
        positions = cache.filled[:, None] + topology.depth
        positions = positions if end is None else positions.clamp_max(end - 1)
        sees_all = cache.even is not None and topology.num_nodes == 1  # a root alone, in rows of one length
        masks = None if sees_all else self._masks(topology)
        if last is None or self.backbone.splits:
            return self.forward(draft.ids, positions, masks, last)
        # A whole model takes the positions of `last` from the host, which would wait for the device to read them.
        return Readout(*(at(part, last) for part in self.forward(draft.ids, positions, masks)))

    def _masks(self, topology: Topology) -> Mask:
        cache, dtype = self.cache, self.backbone.dtype
        if cache.even is not None and self.layers.is_full:  # every node sees all of the text before the tree
            mask = after_text(topology, dtype, cache.even).expand(len(cache.lengths), -1, -1, -1)
            return self.layers.masks(lambda kind: mask)
        return tree_masks(self.layers, dtype, topology, cache.filled, cache.width)

    def depth_limit(self, draft: Draft) -> Tensor | None:
        """The greatest depth [B] at which a node of each row may be accepted; `None`: all depths fit the context."""
        end = self._end(draft.topology)
        return None if end is None else end - 1 - self.cache.filled

    def _end(self, topology: Topology) -> int | None:
        """The first position in a text at which no draft node may be accepted; `None` if the draft does not reach it.

        This position is the end of the context, or the length at which longrope switches factors. Longrope switches for
        all tokens of a forward, by the greatest position, so a draft across that length would rotate nodes wrongly."""
        context, boundary = self.backbone.context, self.backbone.rope_boundary
        if self.cache.is_compiled:  # the code serves texts of all lengths
            return context
        longest = self.cache.longest
        ends = [context, boundary if boundary is not None and longest < boundary else None]
        return min((end for end in ends if end is not None and longest + topology.max_depth >= end), default=None)

    def _reread(self) -> None:
        """Read the only text of a batch again when it outgrows longrope's original context, as Phi-3's `generate` does.

        Only for Phi-3 models, which then drop keys rotated by longrope's short factors; other longrope models keep
        them."""
        boundary = self.backbone.rope_boundary
        if boundary is None or not self.backbone.rereads or self.sequences is None or self.cache.longest != boundary:
            return
        text = self.sequences.prefix(0)  # [1, boundary + 1]: its root is written, and its position turns all others
        self.cache.cut([0])
        Reader.prefill(self, text, [text.shape[1]])  # this model alone: a subclass would also let its others read
        self.cache.cut([boundary])  # without the root, which the draft holds

    @property
    def caches(self) -> list[TreeCache]:
        """The KV caches of all models that read the texts; all of them commit the same nodes."""
        return [self.cache]


class ReaderFactory:
    """Makes the reader of one decoding run: here, one that runs the backbone alone; subclasses add other models."""

    def context(self, backbone: Backbone) -> int | None:
        """The number of tokens that all reading models can take as context; `None` if it is unlimited."""
        return backbone.context

    def create(self, backbone: Backbone, sequences: Sequences, capacity: int, fixed: bool = False) -> Reader:
        """Make a reader of the texts in `sequences`, with empty KV caches of `capacity` slots per row."""
        prepare_linear(backbone.model)
        cache = TreeCache(backbone.model.config, len(sequences), capacity, backbone.device, fixed)
        return Reader(backbone, cache, None if fixed else sequences)  # compiled steps outlive a session's texts
