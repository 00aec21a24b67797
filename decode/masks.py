"""Attention masks of drafts: which slots of the KV cache each draft node sees, in each kind of attention layer.

A node sees the text before it, its ancestors and itself. Masks are additive, because eager attention would silently add
a boolean mask as 0 and 1. Windows and chunks are measured in positions, not slots; nodes of one depth share a position.

Shapes: B rows of the batch, N nodes of a draft, S cache slots, W nodes of one forward, A nodes of their longest path,
R = 1 if all rows share a topology, else R = B, M slots after the text.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.topology import Topology
from medusa.tree_support import FULL_LAYER, LayerKind, LayerKinds, Mask, additive, aligned


def tree_masks(layers: LayerKinds, dtype: torch.dtype, topology: Topology, lengths: Tensor, slots: int) -> Mask:
    """Make masks [B, 1, N, slots] for N draft nodes after B texts of `lengths` [B] tokens, for all kinds of layers."""
    return layers.masks(lambda kind: additive(visible_slots(topology, lengths, slots, kind), dtype)[:, None])


def after_text(topology: Topology, dtype: torch.dtype, length: int) -> Tensor:
    """Make the mask [R, 1, N, length + N] of N nodes that all see the same `length` tokens, without windows or chunks.

    It is what `tree_masks` makes, in a tenth of the time after a long text."""
    width = length + topology.num_nodes
    tree = additive(topology.ancestors[:, None], dtype)
    return F.pad(tree, (length, aligned(width) - width))[..., :width]


def visible_slots(topology: Topology, lengths: Tensor, slots: int, kind: LayerKind = FULL_LAYER) -> Tensor:
    """Find which cache slots each of N draft nodes sees, [B, N, slots] bool, after B texts of `lengths` [B] tokens."""
    ancestors, depth = topology.ancestors.expand(len(lengths), -1, -1), topology.depth.expand(len(lengths), -1)
    return kind.limited(*_by_slot(ancestors, lengths, depth, depth, slots))


def grown_masks(
    layers: LayerKinds,
    dtype: torch.dtype,
    lengths: Tensor,
    seen: Tensor,
    depth: Tensor,
    slot_depths: Tensor,
    slots: int,
) -> Mask:
    """Make masks [B, 1, W, S] for one of the forwards that grow a tree: W new nodes look at S slots of the KV cache.

    Args:
        lengths: the text's length [B] in each row; a node sees all of it, except outside a layer's window or chunk.
        seen: [B, W, A] slots of each node and its drafted ancestors (0: the first after the text), padded with its own.
        depth: [B, W] position of each new node minus the length of its row's text.
        slot_depths: [M] the same for the node in each of the M slots after the text, equal in all rows.
        slots: S."""
    own = torch.zeros(*seen.shape[:2], len(slot_depths), dtype=torch.bool, device=seen.device).scatter_(2, seen, True)
    by_slot = _by_slot(own, lengths, depth, slot_depths.expand(len(lengths), -1), slots)
    return layers.masks(lambda kind: additive(kind.limited(*by_slot), dtype)[:, None])


def _by_slot(
    own: Tensor, starts: Tensor, depth: Tensor, node_depths: Tensor, slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the slots that W nodes see [B, W, slots], and the positions of nodes [B, W, 1] and slots [B, 1, slots].

    After a text of `starts` [B] tokens, the cache holds N nodes of depth `node_depths` [B, N]. Each of the W nodes, of
    depth `depth` [B, W], sees the text and those of the N nodes that are true in `own` [B, W, N]."""
    nodes, prefix, slot = own.shape[2], starts[:, None], torch.arange(slots, device=starts.device)[None]
    node = slot - prefix  # [B, S] the node in each slot; below 0: the text
    is_text, inside = node < 0, node.clamp(0, nodes - 1)
    of_slot = own.gather(2, inside[:, None].expand(-1, own.shape[1], -1))
    allowed = is_text[:, None] | ((node < nodes)[:, None] & of_slot)
    key = torch.where(is_text, slot, prefix + node_depths.gather(1, inside))[:, None]
    return allowed, (prefix + depth)[:, :, None], key
