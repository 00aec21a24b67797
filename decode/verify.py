"""Verification: one forward of the backbone over all nodes of a draft, on top of the cached text."""

from __future__ import annotations

from torch import Tensor

from decode.cache import Paths, TreeCache
from decode.draft import Draft
from decode.masks import TreeMasks
from decode.ops.fast_linear import FastLinear, prepare_linear
from decode.ops.grouped_attention import grouped, sharing
from decode.ops.transfer import on_device
from decode.prefill import OnHidden, prefill
from decode.sequences import Sequences
from decode.topology import Topology
from medusa.backbone import Backbone, Readout


class Verifier:
    """Verifies drafts by forwards of the backbone, and manages the KV cache of a session's texts."""

    def __init__(self, backbone: Backbone, cache: TreeCache, sequences: Sequences | None = None) -> None:
        """Make a verifier on `cache`; `sequences` holds the texts, for models that read a text again (`reread`)."""
        self.backbone, self.cache, self.sequences = backbone, cache, sequences
        self.masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)
        self.linear = FastLinear(backbone.head_weight)
        self.first_end = min(end for end in (backbone.context, backbone.rope_boundary, float("inf")) if end is not None)
        """The first position at which a text can meet an end (`_end`)."""
        self.attention = grouped(backbone.config)

    def prefill(self, ids: Tensor, lengths: list[int], on_hidden: OnHidden | None = None) -> Readout:
        return prefill(self.backbone, self.cache, ids, lengths, on_hidden)

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

    def read(self, draft: Draft) -> Readout:
        """Run one forward over a draft's nodes (no side branches); returns their hidden states and logits."""
        if self.backbone.rereads and self.sequences is not None:
            reread(self.backbone, self.cache, self.sequences)
        lengths, ids, topology = self.cache.lengths, draft.ids, draft.topology
        if self.cache.is_even:
            positions = topology.depth + lengths[0]
            if len(lengths) > 1:
                positions = positions.expand(len(lengths), -1)
        else:
            positions = on_device(lengths, ids.device)[:, None] + topology.depth
        end = self._end(topology)
        if end is not None:
            # Nodes beyond the end are never accepted (`depth_limit`), but must not ask for a position there either.
            positions = positions.clamp(max=end - 1)
        sees_all = self.cache.is_even and topology.num_nodes == 1  # a root alone, in rows of one length
        masks = None if sees_all else self.masks(lengths, topology)
        with self.attention, sharing(masks), self.linear(ids.numel()):
            return self.backbone.forward(ids, self.cache, position_ids=positions, attention_mask=masks)

    def depth_limit(self, draft: Draft) -> Tensor | None:
        """The greatest depth [B] at which a node of each row may be accepted; `None`: all depths fit the context."""
        end = self._end(draft.topology)
        return None if end is None else end - 1 - on_device(self.cache.lengths, self.masks.device)

    def commit(self, path: Paths, counts: list[int]) -> None:
        """Keep the accepted nodes of the last draft; see `TreeCache.commit`."""
        self.cache.commit(path, counts)

    def select(self, rows: list[int]) -> None:
        self.cache.select(rows)

    def join(self, other: Verifier) -> None:
        """Append the rows of another verifier of the same models."""
        self.cache.join(other.cache)

    def _end(self, topology: Topology) -> int | None:
        """The first position in a text at which no draft node may be accepted; `None` if the draft does not reach it.

        This position is the end of the context, or the length at which longrope switches factors. Longrope switches for
        all tokens of a forward, by the greatest position, so a draft across that length would rotate nodes wrongly."""
        longest, boundary = self.cache.longest, self.backbone.rope_boundary
        if longest + topology.max_depth < self.first_end:
            return None
        ends = [self.backbone.context, boundary if boundary is not None and longest < boundary else None]
        return min((end for end in ends if end is not None and longest + topology.max_depth >= end), default=None)


class VerifierFactory:
    """Makes the verifier of one decoding run: here, one that runs the backbone alone; subclasses add other models."""

    def context(self, backbone: Backbone) -> int | None:
        """The number of tokens that all verifying models can read as context; `None` if it is unlimited."""
        return backbone.context

    def create(self, backbone: Backbone, sequences: Sequences, capacity: int) -> Verifier:
        """Make a verifier for the texts in `sequences`, with empty KV caches of `capacity` slots per row."""
        prepare_linear(backbone.model)
        return Verifier(backbone, TreeCache(backbone.model.config, len(sequences), capacity), sequences)


def reread(backbone: Backbone, cache: TreeCache, sequences: Sequences) -> None:
    """Read the only text of a batch again when it outgrows longrope's original context, as Phi-3's own `generate` does.

    Only for Phi-3 models, which then drop keys rotated by longrope's short factors; other longrope models keep them."""
    boundary = backbone.rope_boundary
    if boundary is None or cache.longest != boundary or not backbone.rereads:
        return
    text = sequences.prefix(0)  # [1, boundary + 1]: its root is already written, and its position turns all others
    cache.cut([0])
    prefill(backbone, cache, text, [text.shape[1]])
    cache.cut([boundary])  # without the root, which the draft holds
