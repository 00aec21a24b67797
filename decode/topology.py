"""How the nodes of a draft hang together, as tensors: one topology for all rows, or one for each.

A static tree, the most probable part of a larger one, a chain and the paths of an n-gram all take this form, so nothing
behind the drafter asks which of them it has. Node 0 is the root, and a parent stands before its children.

Shapes: B rows, R = 1 where they share one topology and R = B where each has its own, N nodes, D the greatest depth
(0 for the root alone), C the most children that a node may have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa.tree import Tree


@dataclass(frozen=True, eq=False)
class Topology:
    """Who stands under whom."""

    parent: Tensor
    """[R, N] index of each node's parent; the root is its own."""
    depth: Tensor
    """[R, N] number of drafted tokens on the way from the root."""
    ancestors: Tensor
    """[R, N, N] True where the column is the row itself or stands above it."""
    paths: Tensor
    """[R, N, D + 1] nodes from the root to each node, padded with -1."""
    max_children: int
    """C, known without asking the device."""
    is_static: bool = False
    """Whether all steps share it, so that what depends on it is worth keeping."""

    @classmethod
    def of(cls, tree: Tree) -> Topology:
        """The same topology for every row."""
        most = tree.children.shape[1]
        return cls(tree.parent[None], tree.depth[None], tree.ancestors[None], tree.paths[None], most, is_static=True)

    @classmethod
    def from_parents(cls, parent: Tensor, depth: Tensor, max_depth: int, max_children: int) -> Topology:
        """From parent and depth [R, N] of every node, parents first; one operation a level, and no Python per node."""
        rows, nodes = parent.shape
        itself = torch.eye(nodes, dtype=torch.bool, device=parent.device).expand(rows, -1, -1)
        ancestors, above = itself, parent
        line = torch.arange(nodes, device=parent.device).expand(rows, -1)
        paths = torch.full((rows, nodes, max_depth + 1), -1, device=parent.device)
        for up in range(max_depth + 1):
            place = (depth - up).clamp_min(0)  # above the root there is the root again
            paths.scatter_(2, place[:, :, None], line[:, :, None])
            if up < max_depth:
                ancestors = ancestors | itself.gather(1, above[:, :, None].expand(-1, -1, nodes))
                line, above = above, parent.gather(1, above)
        return cls(parent, depth, ancestors, paths, max_children)

    def beside(self, other: Topology) -> Topology:
        """Both under one root, the nodes of `other` behind these."""
        rows, mine, theirs = max(len(self.parent), len(other.parent)), self.num_nodes, other.num_nodes - 1
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
            ancestors=joined(F.pad(self.ancestors, (0, theirs)), below),
            paths=joined(next(paths), moved(next(paths))),
            max_children=self.max_children + other.max_children,
        )

    @property
    def is_shared(self) -> bool:
        return len(self.parent) == 1

    @property
    def num_nodes(self) -> int:
        return self.parent.shape[1]

    @property
    def max_depth(self) -> int:
        return self.paths.shape[2] - 1

    def at(self, table: Tensor, rows: Tensor, nodes: Tensor) -> Tensor:
        """table [R, N, ...] of this topology, rows [X] of the B and a node of each [X] -> entries [X, ...]."""
        return table[0].index_select(0, nodes) if self.is_shared else table[rows, nodes]

    @property
    def non_ancestors(self) -> Tensor:
        """[R, N, N] True where a node (the column) may hold anything, as far as another (the row) is concerned.

        That is where it does not stand above it, or is the root, which is decided."""
        return self._non_ancestors if self.is_static else self._find_non_ancestors()

    @cached_property
    def _non_ancestors(self) -> Tensor:
        return self._find_non_ancestors()

    def _find_non_ancestors(self) -> Tensor:
        root = torch.arange(self.num_nodes, device=self.parent.device) == 0
        return ~self.ancestors | root

    @cached_property
    def place(self) -> Tensor:
        """[R, N] the place of each node among its siblings, from 0; 0 for the root, which is nobody's child."""
        return self.find_place()

    @cached_property
    def children(self) -> Tensor:
        """[R, N, C] the children of each node in the order of their numbers, padded with -1."""
        return self.find_children(self.place)

    def find_place(self) -> Tensor:
        """`place`, anew: a compiled region cannot trace through what keeps it."""
        siblings = self.parent[:, 1:, None] == self.parent[:, None, 1:]
        place = siblings.tril(-1).sum(-1)
        return torch.cat([torch.zeros_like(self.parent[:, :1]), place], dim=1)

    def find_children(self, place: Tensor) -> Tensor:
        """`children`, anew."""
        rows, device = len(self.parent), self.parent.device
        table = torch.full((rows, self.num_nodes * self.max_children), -1, device=device)
        slot = self.parent * self.max_children + place
        table.scatter_(1, slot[:, 1:], torch.arange(1, self.num_nodes, device=device).expand(rows, -1))
        return table.view(rows, self.num_nodes, self.max_children)


def chosen_part(tree: Tree, chosen: Tensor) -> Topology:
    """The topology of some nodes of `tree` in each row; chosen [B, N], ascending, with every node's parent and 0."""
    where = torch.zeros(len(chosen), tree.num_nodes + 1, dtype=torch.long, device=chosen.device)
    where[:, -1] = -1  # so that the padding of paths stays what it is
    where.scatter_(1, chosen, torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen))
    lines = tree.paths[chosen]  # [B, N, D + 1]
    return Topology(
        parent=where.gather(1, tree.parent[chosen]),
        depth=tree.depth[chosen],
        ancestors=tree.ancestors[chosen[:, :, None], chosen[:, None, :]],
        paths=where.gather(1, lines.flatten(1) % where.shape[1]).view(lines.shape),
        max_children=min(tree.children.shape[1], chosen.shape[1] - 1),
    )
