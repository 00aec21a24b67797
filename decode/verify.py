"""One forward of the backbone over all nodes of a draft: masks, positions, logits.

A node sees the text before it, its ancestors and itself. Masks are additive and of the model's dtype (0, or the least
finite number): eager attention silently adds a boolean mask as 0 and 1. Models with several kinds of layers get one
mask per kind, and windows count positions, not slots: two nodes of one depth have one position but two slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from decode.cache import TreeCache
from decode.draft import Draft
from decode.ops.grouped_attention import grouped
from decode.prefill import prefill
from decode.sequences import Sequences
from decode.topology import Topology
from medusa.backbone import Backbone, Readout

Mask = Tensor | dict[str, Tensor]


class TreeMasks:
    """Masks of drafts for rows of any length.

    For a prefix of length L what a node sees depends only on the distance of a slot from the prefix's end. So for a
    static topology, which all rows and steps share, one wide mask [N, S + N + S], laid out as prefix, tree and nothing,
    is built once and serves every L: the columns from S - L on.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.kinds = layer_kinds(config)
        self.window = getattr(config, "sliding_window", None)
        self.chunk = getattr(config, "attention_chunk_size", None)
        self.is_dict = getattr(config, "layer_types", None) is not None
        self.capacity = 0
        self.wide: dict[str, Tensor] = {}
        self.wide_of: Topology | None = None

    def __call__(self, lengths: Sequence[int], topology: Topology) -> Mask:
        """Masks [B, 1, N, max(lengths) + N] for rows with `lengths` committed tokens; a dict where kinds differ."""
        masks = {kind: self._of_kind(kind, lengths, topology)[:, None] for kind in self.kinds}
        return masks if self.is_dict else masks[self.kinds[0]]

    def _of_kind(self, kind: str, lengths: Sequence[int], topology: Topology) -> Tensor:
        longest = max(lengths)
        if kind == "chunked_attention":  # chunks start at absolute positions, so nothing can be reused
            return self._additive(visible(topology, lengths, chunk=self.chunk))
        window = self.window if kind == "sliding_attention" else None
        if not topology.is_static:
            if window is None and min(lengths) == longest:  # all of the text, and the tree
                return F.pad(self._additive(topology.ancestors), (longest, 0)).expand(len(lengths), -1, -1)
            return self._additive(visible(topology, lengths, window=window))
        if topology is not self.wide_of or longest > self.capacity:
            self._build(topology, max(2 * self.capacity, longest + 256) if longest > self.capacity else self.capacity)
        wide, width = self.wide[kind], longest + topology.num_nodes
        rows = [wide[:, self.capacity - length :][:, :width] for length in lengths]
        return rows[0][None] if len(rows) == 1 else torch.stack(rows)

    def _build(self, topology: Topology, capacity: int) -> None:
        self.wide_of, self.capacity, nodes = topology, capacity, topology.num_nodes
        for kind in self.kinds:
            if kind == "chunked_attention":
                continue
            window = self.window if kind == "sliding_attention" else None
            seen = visible(topology, [capacity], window=window)[0]
            nothing = torch.zeros(nodes, capacity, dtype=torch.bool, device=self.device)
            self.wide[kind] = self._additive(torch.cat([seen, nothing], dim=1))

    def _additive(self, allowed: Tensor) -> Tensor:
        zeros = torch.zeros(allowed.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(~allowed, torch.finfo(self.dtype).min)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """The kinds of attention among the layers, in transformers' words."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return sorted(set(kinds))
    if getattr(config, "sliding_window", None):
        return ["sliding_attention"]
    return ["chunked_attention" if getattr(config, "attention_chunk_size", None) else "full_attention"]


def visible(topology: Topology, lengths: Sequence[int], window: int | None = None, chunk: int | None = None) -> Tensor:
    """[B, N, max(lengths) + N] what each node may see, from the definition: the slow and obvious version."""
    prefix = torch.tensor(lengths, device=topology.depth.device)
    return visible_slots(topology, prefix, max(lengths) + topology.num_nodes, window, chunk)


def visible_slots(
    topology: Topology, lengths: Tensor, slots: int, window: int | None = None, chunk: int | None = None
) -> Tensor:
    """lengths [B] on the device -> [B, N, slots] which of the first `slots` slots each node may see."""
    nodes, prefix = topology.num_nodes, lengths[:, None]  # [B, 1]
    slot = torch.arange(slots, device=lengths.device)[None]  # [1, S]
    node = slot - prefix  # [B, S] which node lies in the slot; below 0: the text before
    is_text, is_node = node < 0, (node >= 0) & (node < nodes)
    node = node.clamp(0, nodes - 1)
    ancestors, depth = topology.ancestors.expand(len(lengths), -1, -1), topology.depth.expand(len(lengths), -1)
    of_slot = ancestors.gather(2, node[:, None].expand(-1, nodes, -1))
    allowed = is_text[:, None] | (is_node[:, None] & of_slot)  # [B, N, S]
    of_key = torch.where(is_text, slot, prefix + depth.gather(1, node))[:, None]  # positions [B, 1, S]
    of_query = (prefix + depth)[:, :, None]  # [B, N, 1]
    if window is not None:
        allowed &= of_query - of_key < window
    if chunk is not None:
        allowed &= of_query // chunk == of_key // chunk
    return allowed


def path_masks(backbone: Backbone, starts: Tensor, line: Tensor, depth: Tensor, depths: Tensor) -> Mask:
    """Masks [B, 1, W, S] for nodes of a tree that several forwards grow, each behind the other's nodes.

    Args:
        starts: [B] where the text ends, all of which every node sees.
        line: [B, W, A] which slots behind the text a node sees: its ancestors' and its own.
        depth: [B, W] positions of the nodes, counted from the text's end.
        depths: [nodes] those of all nodes behind the text, these included.
    """
    config, nodes = backbone.config, len(depths)
    seen = torch.zeros(*line.shape[:2], nodes, dtype=torch.bool, device=line.device).scatter_(2, line, True)
    slot = torch.arange(int(starts.max()) + nodes, device=line.device)
    behind = slot - starts[:, None]  # [B, S] which of the nodes lies in a slot; below 0: the text
    node = behind.clamp(0, nodes - 1)
    own = seen.gather(2, node[:, None].expand(-1, line.shape[1], -1))
    allowed = torch.where(behind[:, None] < 0, True, own & (behind[:, None] < nodes))
    key = torch.where(behind < 0, slot, starts[:, None] + depths[node])[:, None]  # positions [B, 1, S]
    query = (starts[:, None] + depth)[:, :, None]  # [B, W, 1]
    masks = {}
    for kind in layer_kinds(config):
        here = allowed
        if kind == "sliding_attention":
            here = here & (query - key < config.sliding_window)
        elif kind == "chunked_attention":
            here = here & (query // config.attention_chunk_size == key // config.attention_chunk_size)
        zeros = torch.zeros(here.shape, dtype=backbone.dtype, device=line.device)
        masks[kind] = zeros.masked_fill_(~here, torch.finfo(backbone.dtype).min)[:, None]
    return masks if getattr(config, "layer_types", None) is not None else next(iter(masks.values()))


class Verifier:
    """Runs the backbone over drafts on top of a cache."""

    def __init__(self, backbone: Backbone, cache: TreeCache, sequences: Sequences | None = None) -> None:
        """`sequences`: the text in the cache, for models that must read it again (`reread`)."""
        self.backbone, self.cache, self.sequences = backbone, cache, sequences
        self.masks = TreeMasks(backbone.config, backbone.dtype, backbone.device)

    def __call__(self, draft: Draft) -> Readout:
        """Hidden states [B, N, H] and logits [B, N, V] of all nodes; the cache then holds them, uncommitted.

        What stands aside is read in the same forward, and told to whoever asked.
        """
        readout = self.read(draft.whole)
        if not draft.side_branches:
            return readout
        nodes = start = draft.topology.num_nodes
        for aside in draft.side_branches:
            count = aside.topology.num_nodes - 1
            aside.on_logits(readout.logits[:, start : start + count])
            start += count
        return Readout(readout.hidden[:, :nodes], readout.logits[:, :nodes])

    def read(self, draft: Draft) -> Readout:
        """The forward over a draft that is whole, nothing standing aside."""
        if self.sequences is not None:
            reread(self.backbone, self.cache, self.sequences)
        lengths, ids, topology = self.cache.lengths, draft.ids, draft.topology
        if self.cache.is_even:
            positions = (topology.depth + lengths[0]).expand(len(lengths), -1)
        else:
            positions = torch.tensor(lengths, device=ids.device)[:, None] + topology.depth
        end = self._end(topology)
        if end is not None:
            # Nodes beyond the end are never accepted (`room`), and only nodes like them are below them; all that
            # matters is that they ask for no position there.
            positions = positions.clamp(max=end - 1)
        # A root alone, in rows of one length, sees all that is in the cache.
        alone = self.cache.is_even and topology.num_nodes == 1
        masks = None if alone else self.masks(lengths, topology)
        with grouped(self.backbone.config):
            return self.backbone.forward(ids, self.cache, position_ids=positions, attention_mask=masks)

    def room(self, draft: Draft) -> Tensor | None:
        """[B] how deep each row's nodes may be accepted in this step; `None` where nothing limits them."""
        end = self._end(draft.topology)
        if end is None:
            return None
        return end - 1 - torch.tensor(self.cache.lengths, device=self.masks.device)

    def _end(self, topology: Topology) -> int | None:
        """The first position that no node of this step may take, if the tree reaches it.

        That is the end of the context, and before it the length at which longrope changes its rotations: they follow
        the longest position of a forward, so a tree across it would rotate all of its nodes otherwise than plain
        decoding does.
        """
        longest, boundary = self.cache.longest, self.backbone.rope_boundary
        ends = [self.backbone.context, boundary if boundary is not None and longest < boundary else None]
        return min((end for end in ends if end is not None and longest + topology.max_depth >= end), default=None)


def reread(backbone: Backbone, cache: TreeCache, sequences: Sequences) -> None:
    """Fill the cache anew where the backbone's own `generate` does: when a text outgrows longrope's boundary.

    The keys of the text were rotated by the short factors; Phi-3 throws them away there and reads the whole text by the
    long ones. (Other models with longrope keep them.) Such a text is alone in its batch.
    """
    boundary = backbone.rope_boundary
    if boundary is None or cache.longest != boundary or not backbone.rereads:
        return
    text = sequences.prefix(0)  # [1, boundary + 1]: the root, whose position turns all of them, is written already
    cache.rewind()
    prefill(backbone, cache, text, [text.shape[1]])
    cache.cut([boundary])  # without the root, which the tree holds
