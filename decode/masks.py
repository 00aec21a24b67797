"""Attention masks of drafts: which slots of the KV cache each draft node sees, in each kind of attention layer.

A node sees the text before it, its ancestors and itself. Masks are additive, because eager attention would silently add
a boolean mask as 0 and 1. Windows and chunks are measured in positions, not slots; nodes of one depth share a position.

Shapes: B rows of the batch, N nodes of a draft, S cache slots, W nodes of one forward, A nodes of their longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from decode.ops.transfer import on_device
from decode.topology import Topology
from medusa.tree_support import FULL_LAYER, LayerKind, LayerKinds, Mask, additive, aligned

STEP = 256
"""Wide masks are made for texts of a multiple of so many tokens."""
MOST_KEPT = 2**17
"""Nodes times tokens of the largest masks that are kept; such a mask takes about 1 MB in float32."""


class TreeMasks:
    """Attention masks of drafts, for rows of any length.

    Whether a draft node sees a cache slot depends only on the slot's distance from the text's end. So a static tree
    needs one wide mask [1, 1, N, S + N + S + 8] for texts of up to S tokens: S columns of text, N of nodes, and S + 8
    that no node sees, for the padding of shorter rows and of aligned masks. For a text of L tokens, the columns from
    S - L on are copied, because attention on a GPU needs aligned masks (`medusa.tree_support.additive`). One text on a
    CPU reads the wide mask itself."""

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.copies = needs_aligned(device)
        self.layers = LayerKinds(config)
        self.capacity = 0
        self.wide: dict[str, Tensor] = {}
        self.wide_of: Topology | None = None

    def __call__(self, lengths: Sequence[int], topology: Topology) -> Mask:
        """Make masks [B, 1, N, max(lengths) + N] for N draft nodes, after `lengths[b]` cached tokens of each row b."""
        kinds = self.layers.kinds
        if not self.layers.is_dict:
            return self._of_kind(kinds[0], lengths, topology)
        return {kind.name: self._of_kind(kind, lengths, topology) for kind in kinds}

    def _of_kind(self, kind: LayerKind, lengths: Sequence[int], topology: Topology) -> Tensor:
        longest = max(lengths)
        if topology is not self.wide_of or longest > self.capacity or kind.chunk is not None:
            if kind.chunk is not None:  # chunks start at absolute positions, so no mask serves two lengths
                return additive(visible(topology, lengths, kind), self.dtype)[:, None]
            if not topology.is_static:
                return self._of_step(kind, lengths, topology)
            self._build(topology, self.capacity if longest <= self.capacity else wide_enough(longest, self.capacity))
        wide = self.wide[kind.name]
        width = longest + wide.shape[2]
        if len(lengths) == 1 and not self.copies:
            return wide.narrow(3, self.capacity - longest, width)
        return torch.cat([wide.narrow(3, self.capacity - own, aligned(width)) for own in lengths])[..., :width]

    def _of_step(self, kind: LayerKind, lengths: Sequence[int], topology: Topology) -> Tensor:
        """The mask for a tree that only one step has."""
        longest = max(lengths)
        one_for_all = len(lengths) > 1 and min(lengths) == longest and topology.is_shared
        numpy_can_read = topology.ancestors.is_cpu and self.dtype == torch.float32
        if numpy_can_read and not (one_for_all or self.copies) and kind.window is None:
            return _on_host(lengths, topology)
        if kind.window is not None or min(lengths) < longest:
            return additive(visible(topology, lengths, kind), self.dtype)[:, None]
        # All of the text, and the tree.
        width, tree = longest + topology.num_nodes, additive(topology.ancestors[:, None], self.dtype)
        padded = F.pad(tree, (longest, aligned(width) - width))
        return padded[..., :width].expand(len(lengths), -1, -1, -1)

    def _build(self, topology: Topology, capacity: int) -> None:
        self.wide_of, self.capacity = topology, capacity
        make = kept_wide_mask if topology.num_nodes * capacity <= MOST_KEPT else wide_mask
        for kind in self.layers.kinds:
            if kind.chunk is None:
                self.wide[kind.name] = make(topology, kind, capacity, self.dtype)


def wide_enough(length: int, capacity: int) -> int:
    """The tokens for which the next wide mask has room: a multiple of STEP, so that many texts ask for the same one."""
    return -(-max(2 * capacity, length + STEP // 2) // STEP) * STEP


def wide_mask(topology: Topology, kind: LayerKind, capacity: int, dtype: torch.dtype) -> Tensor:
    """Make the wide mask of a static tree (`TreeMasks`) for texts of up to S = `capacity` tokens."""
    with torch.inference_mode(False):  # a kept mask may serve forwards with gradients
        nothing = torch.zeros(topology.num_nodes, capacity + 8, dtype=torch.bool, device=topology.depth.device)
        seen = visible(topology, [capacity], kind)[0]
        return additive(torch.cat([seen, nothing], dim=1), dtype)[None, None]


kept_wide_mask = lru_cache(maxsize=8)(wide_mask)
"""`wide_mask` for small masks. The results are kept for later texts, so callers must not change them."""


def _on_host(lengths: Sequence[int], topology: Topology) -> Tensor:
    """Make the float32 mask [B, 1, N, max(lengths) + N] by NumPy: for eight texts 40 us, by tensor operations 170."""
    nodes, hidden = topology.num_nodes, torch.finfo(torch.float32).min
    ancestors = topology.ancestors.expand(len(lengths), -1, -1).numpy()
    trees = np.where(ancestors, np.float32(0), np.float32(hidden))
    masks = np.full((len(lengths), 1, nodes, max(lengths) + nodes), hidden, np.float32)
    for mask, length, tree in zip(masks[:, 0], lengths, trees, strict=True):
        mask[:, :length] = 0
        mask[:, length : length + nodes] = tree
    return torch.from_numpy(masks)


def needs_aligned(device: torch.device) -> bool:
    """Whether attention on `device` needs aligned masks; a CPU reads any part of a wide mask."""
    return device.type != "cpu"


def visible(topology: Topology, lengths: Sequence[int], kind: LayerKind = FULL_LAYER) -> Tensor:
    """Find which cache slots N draft nodes see, [B, N, max(lengths) + N] bool, after `lengths[b]` tokens of row b."""
    prefix = on_device(lengths, topology.depth.device)
    return visible_slots(topology, prefix, max(lengths) + topology.num_nodes, kind)


def visible_slots(topology: Topology, lengths: Tensor, slots: int, kind: LayerKind = FULL_LAYER) -> Tensor:
    """Find which cache slots each of N draft nodes sees, [B, N, slots] bool, after B texts of `lengths` [B] tokens."""
    ancestors, depth = topology.ancestors.expand(len(lengths), -1, -1), topology.depth.expand(len(lengths), -1)
    return kind.limited(*_by_slot(ancestors, lengths, depth, depth, slots))


def grown_masks(
    layers: LayerKinds, dtype: torch.dtype, lengths: Sequence[int], seen: Tensor, depth: Tensor, slot_depths: Tensor
) -> Mask:
    """Make masks [B, 1, W, S] for one of the forwards that grow a tree: W new nodes look at S slots of the KV cache.

    Args:
        lengths: the text's length in each of B rows; a node sees all of it, except outside a layer's window or chunk.
        seen: [B, W, A] slots of each node and its drafted ancestors (0: the first after the text), padded with its own.
        depth: [B, W] position of each new node minus the length of its row's text.
        slot_depths: [S - max(lengths)] the same for the node in each slot after the text, equal in all rows."""
    nodes, starts = len(slot_depths), on_device(lengths, seen.device)
    own = torch.zeros(*seen.shape[:2], nodes, dtype=torch.bool, device=seen.device).scatter_(2, seen, True)
    by_slot = _by_slot(own, starts, depth, slot_depths.expand(len(starts), -1), max(lengths) + nodes)
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
