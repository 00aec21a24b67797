"""How the nodes of a draft are connected, as tensors: one topology for all rows of a batch, or one per row.

Static and dynamic trees, chains and the paths of n-grams all take this form, so the code after the drafter does not
distinguish them. Node 0 is the root, and a parent comes before its children.

Shapes: B rows of the batch, R = 1 if all rows share the topology, else R = B, N nodes, D the greatest depth (0 for the
root alone), C an upper bound of a node's children, X any number of nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.tree import Tree


@dataclass(frozen=True, eq=False)
class Topology:
    """The connections between the nodes of a draft: parents, depths, ancestors and paths, as tensors."""

    parent: Tensor  # [R, N] index of each node's parent; the root is its own parent
    depth: Tensor  # [R, N] number of drafted tokens from the root to each node
    ancestors: Tensor  # [R, N, N] True at [_, i, j] where node j is node i itself or an ancestor of node i
    paths: Tensor  # [R, N, D + 1] nodes from the root to each node, padded with -1
    max_children: int  # C as a number on the host, so that reading it does not wait for the device

    @staticmethod
    @lru_cache(maxsize=8)
    def of(tree: Tree) -> Topology:
        """Make the topology of a static tree, which all rows share; it is stored for the next texts."""
        most = tree.children.shape[1]
        return Topology(tree.parent[None], tree.depth[None], tree.ancestors[None], tree.paths[None], most)

    @classmethod
    def from_parents(cls, parent: Tensor, depth: Tensor, max_depth: int, max_children: int) -> Topology:
        """Make the topology of R trees from the parents and depths [R, N] of their nodes, without a loop over nodes."""
        rows, nodes = parent.shape
        itself = torch.eye(nodes, dtype=torch.bool, device=parent.device).expand(rows, -1, -1)
        above, steps = parent, 1  # `above` is the node so many `steps` above each node
        ancestors = itself | _rows(itself, above)
        while steps < max_depth:
            ancestors, above, steps = ancestors | _rows(ancestors, above), above.gather(1, above), 2 * steps
        place = depth[:, None].expand_as(ancestors).masked_fill(~ancestors, max_depth + 1)  # of each node in the paths
        paths = torch.full((rows, nodes, max_depth + 2), -1, device=parent.device)
        paths.scatter_(2, place, torch.arange(nodes, device=parent.device).expand_as(place))
        paths = paths[:, :, :-1]
        return cls(parent, depth, ancestors, paths, max_children)

    def beside(self, other: Topology) -> Topology:
        """Join two topologies under one root; the nodes of `other`, without its root, follow the nodes of this one."""
        rows, mine, added = max(len(self.parent), len(other.parent)), self.num_nodes, other.num_nodes - 1
        most = max(self.max_depth, other.max_depth)

        def joined(first: Tensor, second: Tensor) -> Tensor:
            return torch.cat([first.expand(rows, *first.shape[1:]), second.expand(rows, *second.shape[1:])], dim=1)

        def moved(nodes: Tensor) -> Tensor:
            return torch.where(nodes > 0, nodes + (mine - 1), nodes)[:, 1:]

        below = F.pad(other.ancestors[:, 1:, 1:], (mine, 0))
        below[:, :, 0] = True
        paths = (F.pad(t.paths, (0, most - t.max_depth), value=-1) for t in (self, other))
        return Topology(
            parent=joined(self.parent, moved(other.parent)),
            depth=joined(self.depth, other.depth[:, 1:]),
            ancestors=joined(F.pad(self.ancestors, (0, added)), below),
            paths=joined(next(paths), moved(next(paths))),
            max_children=self.max_children + other.max_children,
        )

    @property
    def is_shared(self) -> bool:
        return self.parent.shape[0] == 1  # `len` of a tensor is a function in Python, which takes longer

    @property
    def num_nodes(self) -> int:
        return self.parent.shape[1]

    @property
    def max_depth(self) -> int:
        return self.paths.shape[2] - 1

    def at(self, table: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
        """Look up X entries [X, ...], one per pair (row, node), in `table` [R, N, ...] for R trees of N nodes."""
        return table[0].index_select(0, nodes) if self.is_shared else table[rows, nodes]

    @property
    def non_ancestors(self) -> Tensor:
        """A mask [R, N, N], True at [_, i, j] where the token of node j cannot affect whether node i is accepted.

        That is every j that is neither i nor an ancestor of i, and also the root, which is already decided."""
        root = torch.arange(self.num_nodes, device=self.parent.device) == 0
        return ~self.ancestors | root

    @cached_property
    def widths(self) -> list[int]:
        """The most children of a node at each depth from 0 to D - 1, as numbers on the host, which waits for them."""
        most = torch.zeros(self.max_depth + 1, dtype=torch.long, device=self.parent.device)
        place = self.places().expand_as(self.depth).flatten()
        return most.scatter_reduce_(0, self.depth.flatten(), place + 1, "amax")[1:].tolist()

    def places(self) -> Tensor:
        """The index of each node among its siblings, [R, N] in R trees of N nodes; 0 for the root."""
        siblings = self.parent[:, 1:, None] == self.parent[:, None, 1:]
        return F.pad(siblings.tril(-1).sum(-1), (1, 0))

    def children(self) -> Tensor:
        """Indices of each node's children, at most C, [R, N, C] in R trees of N nodes; ascending, padded with -1."""
        (rows, nodes), device = self.parent.shape, self.parent.device
        table = torch.full((rows, nodes * self.max_children), -1, device=device)
        slot = self.parent * self.max_children + self.places()
        table.scatter_(1, slot[:, 1:], torch.arange(1, nodes, device=device).expand(rows, -1))
        return table.view(rows, nodes, self.max_children)


@lru_cache(maxsize=256)
def chain(count: int, device: torch.device) -> Topology:
    """Return the topology of a chain of `count` nodes, root included. All texts of a batch share it."""
    line = torch.arange(count, device=device)
    return Topology.from_parents((line - 1).clamp_min(0)[None], line[None], count - 1, min(count - 1, 1))


def chosen_part(tree: Tree, chosen: Tensor) -> Topology:
    """Make the topology of N nodes of `tree` per row, `chosen` [B, N] in ascending order, root and parents included."""
    place = torch.zeros(len(chosen), tree.num_nodes + 1, dtype=torch.long, device=chosen.device)
    place[:, -1] = -1  # so that the padding of paths stays -1
    place.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
    lines = tree.paths[chosen]  # [B, N, D + 1]
    return Topology(
        parent=place.gather(1, tree.parent[chosen]),
        depth=tree.depth[chosen],
        ancestors=tree.ancestors[chosen[:, :, None], chosen[:, None, :]],
        paths=place.gather(1, lines.flatten(1) % place.shape[1]).view(lines.shape),
        max_children=min(tree.children.shape[1], chosen.shape[1] - 1),
    )


def _rows(table: Tensor, nodes: Tensor) -> Tensor:
    """Select the rows [R, N, N] of the tables [R, N, N] that belong to `nodes` [R, N]."""
    return table.gather(1, nodes[:, :, None].expand_as(table))
