"""What crosses from proposing to verifying: candidate ids with their topology, and who can propose them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from medusa.tree import Tree


class Frontier(NamedTuple):
    """Where a step starts: B rows, each with a decided token that the backbone has not read yet.

    The hidden state is the one from which that token, the root, was decided: Medusa heads guess what follows it.
    """

    root: Tensor
    """[B] the decided token."""
    hidden: Tensor
    """[B, H] the hidden state of the token before it."""


class Draft(NamedTuple):
    """Candidates of one step, node 0 being the root. All rows share one topology."""

    ids: Tensor
    """[B, N] the token of each node."""
    tree: Tree
    """How the N nodes hang together, on the device of `ids`."""


class Drafter(Protocol):
    """Whatever can guess ahead. It never decides: acceptance does."""

    def propose(self, frontier: Frontier) -> Draft:
        """A draft whose root is `frontier.root`."""
        ...
