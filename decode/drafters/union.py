"""The union of the drafts of several drafters, as one draft.

Shapes: B rows, M nodes of all drafts together (the root once), D the greatest depth.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from decode.draft import Draft
from decode.topology import Topology


def union(drafts: Sequence[Draft], most: int) -> Draft:
    """Join drafts of the same roots into one tree of at most `most` nodes with the root.

    Nodes are equal if their paths from the root hold the same tokens. Nodes keep the order of the drafts, and of equal
    nodes the first is kept. So a parent comes before its children, and the first `most` nodes form a tree. Rows with
    fewer nodes are padded with nodes below their last node.
    """
    root, deepest = drafts[0].ids[:, :1], max(draft.topology.max_depth for draft in drafts)
    rows, count = len(root), 1
    ids, parents, depths = [root], [torch.zeros_like(root)], [torch.zeros_like(root)]
    texts = [F.pad(root[:, :, None], (0, deepest), value=-1)]  # tokens on each node's path [B, M, D + 1], or -1
    for draft in drafts:
        topology = draft.topology
        ids.append(draft.ids[:, 1:])
        above = topology.parent[:, 1:].expand(rows, -1)
        parents.append(torch.where(above > 0, above + (count - 1), 0))
        depths.append(topology.depth[:, 1:].expand(rows, -1))
        paths = topology.paths[:, 1:].expand(rows, -1, -1)
        held = draft.ids.gather(1, paths.clamp_min(0).flatten(1)).view(paths.shape).masked_fill(paths < 0, -1)
        texts.append(F.pad(held, (0, deepest - topology.max_depth), value=-1))
        count += topology.num_nodes - 1
    text, number = torch.cat(texts, dim=1), torch.arange(count, device=root.device).expand(rows, -1)
    same = (text[:, :, None] == text[:, None]).all(-1)  # [B, M, M]
    first = same.to(torch.uint8).argmax(-1)  # [B, M] the first node equal to each node
    place = (first == number).cumsum(-1) - 1  # [B, M] the index of each first node in the union
    found = place[:, -1] + 1  # [B] number of nodes of each row's union
    fewest, greatest = torch.stack(found.aminmax()).tolist()
    nodes = min(most, greatest)
    chosen = torch.zeros(rows, count + 1, dtype=torch.long, device=root.device)
    chosen = chosen.scatter_(1, torch.where(first == number, place, count), number)[:, :nodes]
    parent = place.gather(1, first.gather(1, torch.cat(parents, dim=1).gather(1, chosen)))
    depth, drafted = torch.cat(depths, dim=1).gather(1, chosen), torch.cat(ids, dim=1).gather(1, chosen)
    missing = max(nodes - fewest, 0)
    if missing:
        lacks, last = number[:, :nodes] >= found[:, None], (found - 1).clamp_max(nodes - 1)[:, None]
        parent = torch.where(lacks, last, parent)
        depth = torch.where(lacks, depth.gather(1, last) + 1, depth)
        drafted = drafted.masked_fill(lacks, 0)
    widest = min(sum(draft.topology.max_children for draft in drafts) + missing, nodes - 1)
    return Draft(drafted, Topology.from_parents(parent, depth, deepest + bool(missing), widest))
