"""The reader: every forward of a model that decoding makes, on top of the texts in its KV cache, and its masks.

It reads prompts piece by piece, so that memory holds the activations of one piece only, and drafts in one forward. A
piece of C tokens attends to all slots up to its own end, so the largest mask is [C, S], never [S, S], and the LM head
runs at one position per row.

A node of a draft sees the text before it, its ancestors and itself. Masks are additive, because eager attention would
silently add a boolean mask as 0 and 1. Windows and chunks are measured in positions, not slots; nodes of one depth
share a position.

Shapes: B rows of the batch, T tokens of the longest prompt, C tokens of a piece, N nodes of a draft, H hidden size,
V vocabulary, S cache slots, W nodes of one forward, A nodes of their longest path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.cache import TreeCache
from decode.draft import Draft
from decode.layers.reading import reading
from decode.layers.switch import prepare_states
from decode.ops.attention import grouped, uses_own_sdpa
from decode.ops.fast_linear import fast_linear, prepare_linear
from decode.ops.transfer import on_device
from decode.ops.tree_attention import MOST_NODES, TRIED, seen_by
from decode.topology import Topology
from medusa.backbone import Backbone, Readout, at
from medusa.tree_support import FULL_LAYER, LayerKind, LayerKinds, Mask, additive

PIECE_TOKENS, FIRST_TOKENS, MIN_PIECE_ROW = 1024, {"cuda": 8192}, 256
"""Tokens of a piece in all rows together, of the first one if that differs, and the fewest in each row. Larger pieces
gain nothing on a CPU (measured at 8192 tokens, 6 layers of width 288, float32). On a GPU, the first piece alone has
flash attention, because it needs no mask; a mask of 8192 of 32,768 tokens would take half a GiB and more."""
OnHidden = Callable[[Tensor, Tensor, int], Tensor]
"""(hidden states [B, C, H] of a piece, the token after each [B, C], the piece's first position) -> the hidden states
[B, C, H] to use instead."""


class Reader:
    """Reads prompts and drafts with a backbone, and manages the KV cache of a session's texts."""

    def __init__(self, backbone: Backbone, cache: TreeCache) -> None:
        self.backbone, self.cache = backbone, cache
        if cache.state_layers:
            prepare_states(backbone.model)
        self.layers = LayerKinds(backbone.config)
        self.by_kernel = backbone.dtype in TRIED.get(backbone.model, ()) and uses_own_sdpa(backbone.config)
        """Whether attention of the model takes the numbers of `seen_by` for a mask."""
        self.be_stable(False)

    def be_stable(self, stable: bool) -> None:
        """Set whether the numbers of a token must not depend on the other tokens of its forward (`decode.stable`)."""
        self.stable = stable

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
        runs = () if masks is None else self.cache.runs()
        kwargs = {"position_ids": positions.expand(len(ids), -1), "attention_mask": masks}
        head, stable = self.backbone.head_weight, self.stable
        if self.cache.reading is not None:
            self.cache.reading.stable = stable
        linear, states = fast_linear(head, ids.numel(), stable), reading(self.cache.reading)
        with grouped(self.backbone.config, stable, runs), linear, states:
            return self.backbone.forward(ids, self.cache, last, all_hidden, **kwargs)

    def prefill(self, ids: Tensor, lengths: Sequence[int], on_hidden: OnHidden | None = None) -> Readout:
        """Read prompts `ids` [B, T] into the empty cache in pieces; row b has `lengths[b]` tokens, padded on the right.

        A causal model does not see padding after a token. `on_hidden` receives each piece's hidden states and returns
        those to use instead. Returns the last hidden state of each prompt [B, H] and the logits after it [B, V]."""
        (count, device), longest, boundary = (len(ids), ids.device), max(lengths), self.backbone.rope_boundary
        first, size = (
            max(tokens // count, MIN_PIECE_ROW)
            for tokens in (FIRST_TOKENS.get(device.type, PIECE_TOKENS), PIECE_TOKENS)
        )
        last = on_device(lengths, device) - 1
        next_ids = F.pad(ids[:, 1:], (0, 1))
        found: Readout | None = None
        for start in (0, *range(first, longest, size)):
            end = min(start + size if start else first, longest)
            piece, positions = ids[:, start:end], torch.arange(start, end, device=device)
            if boundary is not None and end <= boundary < longest:
                # longrope rotates a forward by its longest position, and this text's lies beyond the boundary. One more
                # token carries that position; no other token sees it, and its slot is overwritten.
                piece = torch.cat([piece, piece[:, -1:]], dim=1)
                positions = torch.cat([positions, positions.new_tensor([longest - 1])])
            final = (last - start).clamp(0, end - start - 1)
            own = [min(max(length - start, 0), end - start) for length in lengths]
            self.cache.open(piece.shape[1])
            ragged = None if min(own) == piece.shape[1] else on_device(own, device)
            self.cache.append(piece.shape[1], own=ragged)
            here = self.forward(piece, positions[None], last=final, all_hidden=on_hidden is not None)
            if on_hidden is not None:
                hidden = on_hidden(here.hidden[:, : end - start], next_ids[:, start:end], start)
                here = here._replace(hidden=at(hidden, final))
            self.cache.keep(own)
            if found is None:
                found = here
            else:  # rows that ended in an earlier piece keep its readout
                goes_on = (last >= start)[:, None].to(here.hidden.device)
                found = Readout(*(torch.where(goes_on, new, old) for new, old in zip(here, found, strict=True)))
        assert found is not None, "an empty prompt is refused before"
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
            cache.open(topology.num_nodes)
        cache.append(topology.num_nodes, topology)
        # Nodes beyond the end are never accepted (`depth_limit`), but must not ask for a position there either.
        end = self._end(topology)
        positions = cache.filled[:, None] + topology.depth
        positions = positions if end is None else positions.clamp_max(end - 1)
        sees_all = cache.even is not None and topology.num_nodes == 1  # a root alone, in rows of one length
        own, depth = topology.ancestors, topology.depth
        masks = None if sees_all else self._masks(own, cache.filled, depth, depth)
        if last is None or self.backbone.splits:
            return self.forward(draft.ids, positions, masks, last)
        # A whole model takes the positions of `last` from the host, which would wait for the device to read them.
        return Readout(*(at(part, last) for part in self.forward(draft.ids, positions, masks)))

    def grown_masks(self, lengths: Tensor, seen: Tensor, depth: Tensor, slot_depths: Tensor) -> Mask:
        """Make masks for one of the forwards that grow a tree: W new nodes look at the S slots of the window.

        Args:
            lengths: the text's length [B] in each row; a node sees all of it, except outside a layer's window or chunk.
            seen: [B, W, A] slots of each node and its drafted ancestors (0: the first after the text), padded with its
                own.
            depth: [B, W] position of each new node minus the length of its row's text.
            slot_depths: [M] the same for the node in each of the M slots after the text, equal in all rows."""
        own = torch.zeros(*seen.shape[:2], len(slot_depths), dtype=torch.bool, device=seen.device)
        return self._masks(own.scatter_(2, seen, True), lengths, depth, slot_depths[None])

    def _masks(self, own: Tensor, lengths: Tensor, depth: Tensor, slot_depths: Tensor) -> Mask:
        """Make what the model takes as masks; for the arguments see `seen_by`."""
        if self.by_kernel and not self.stable and own.shape[2] <= MOST_NODES:
            return self.layers.masks(lambda kind: seen_by(kind, own, lengths, depth, slot_depths))
        return additive_masks(self.layers, self.backbone.dtype, (own, lengths, depth, slot_depths), self.cache.width)

    def depth_limit(self, draft: Draft) -> Tensor | None:
        """The greatest depth [B] at which a node of each row may be accepted; `None`: all depths fit the context."""
        end = self._end(draft.topology)
        return None if end is None else end - 1 - self.cache.filled

    def _end(self, topology: Topology) -> int | None:
        """The first position in a text at which no draft node may be accepted; `None` if the draft does not reach it.

        This position is the end of the context, or the length at which longrope switches factors. Longrope switches for
        all tokens of a forward, by the greatest position, so a draft across that length would rotate nodes wrongly."""
        context, boundary = self.backbone.context, self.backbone.rope_boundary
        if self.cache.is_compiled:  # the code serves texts of all lengths, but none that passes the boundary
            return context if boundary is None else boundary
        longest = self.cache.longest
        ends = [context, boundary if boundary is not None and longest < boundary else None]
        return min((end for end in ends if end is not None and longest + topology.max_depth >= end), default=None)

    @property
    def caches(self) -> list[TreeCache]:
        """The KV caches of all models that read the texts; all of them commit the same nodes."""
        return [self.cache]


class ReaderFactory:
    """Makes the reader of one decoding run: here, one that runs the backbone alone; subclasses add other models."""

    def context(self, backbone: Backbone) -> int | None:
        """The number of tokens that all reading models can take as context; `None` if it is unlimited."""
        return backbone.context

    def create(self, backbone: Backbone, batch_size: int, capacity: int, fixed: bool = False) -> Reader:
        """Make a reader of `batch_size` texts, with empty KV caches of `capacity` slots per row."""
        prepare_linear(backbone.model)
        return Reader(backbone, TreeCache(backbone.model.config, batch_size, capacity, backbone.device, fixed))


def tree_masks(layers: LayerKinds, dtype: torch.dtype, topology: Topology, lengths: Tensor, slots: int) -> Mask:
    """Make masks [B, 1, N, slots] for N draft nodes after B texts of `lengths` [B] tokens, for all kinds of layers."""
    return additive_masks(layers, dtype, (topology.ancestors, lengths, topology.depth, topology.depth), slots)


def additive_masks(
    layers: LayerKinds, dtype: torch.dtype, nodes: tuple[Tensor, Tensor, Tensor, Tensor], slots: int
) -> Mask:
    """Make masks [B, 1, N, slots] for all kinds of layers; `nodes` are the arguments of `seen_by`."""
    found = by_slot(*nodes, slots)
    return layers.masks(lambda kind: additive(kind.limited(*found), dtype)[:, None])


def visible_slots(topology: Topology, lengths: Tensor, slots: int, kind: LayerKind = FULL_LAYER) -> Tensor:
    """Find which cache slots each of N draft nodes sees, [B, N, slots] bool, after B texts of `lengths` [B] tokens."""
    return kind.limited(*by_slot(topology.ancestors, lengths, topology.depth, topology.depth, slots))


def by_slot(
    own: Tensor, starts: Tensor, depth: Tensor, node_depths: Tensor, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the slots that W nodes see [B, W, slots], and the positions of nodes [B, W, 1] and slots [B, 1, slots].

    After a text of `starts` [B] tokens, the cache holds N nodes of depth `node_depths` [B or 1, N]. Each of W nodes, of
    depth `depth` [B or 1, W], sees the text and those of the N nodes that are true in `own` [B or 1, W, N]."""
    own, node_depths = (part.expand(len(starts), *part.shape[1:]) for part in (own, node_depths))
    nodes, prefix, slot = own.shape[2], starts[:, None], torch.arange(slots, device=starts.device)[None]
    node = slot - prefix  # [B, S] the node in each slot; below 0: the text
    is_text, inside = node < 0, node.clamp(0, nodes - 1)
    of_slot = own.gather(2, inside[:, None].expand(-1, own.shape[1], -1))
    allowed = is_text[:, None] | ((node < nodes)[:, None] & of_slot)
    key = torch.where(is_text, slot, prefix + node_depths.gather(1, inside))[:, None]
    return allowed, (prefix + depth)[:, :, None], key
