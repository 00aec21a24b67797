"""What crosses from proposing to verifying: candidate ids with their topology, and who can propose them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from decode.topology import Topology
from medusa.memory import Memory


class Frontier(NamedTuple):
    """Where a step starts: B rows, each with a decided token that the backbone has not read yet.

    The hidden state is the one from which that token, the root, was decided: Medusa heads guess what follows it.
    """

    root: Tensor
    """[B] the decided token."""
    hidden: Tensor
    """[B, H] the hidden state of the token before it."""
    rows: list[int]
    """B numbers: which rows of the session these are; finished ones have left."""
    memory: Memory | None = None
    """The text before, for heads that look back at it."""


class Proposal(NamedTuple):
    """The distributions that a sampled draft was drawn from: siblings in order, without replacement.

    M of them, which rows and nodes with the same past share.
    """

    q: Tensor
    """[M, V] draft probabilities."""
    of_children: Tensor
    """[B, N] which of them the children of each node were drawn from; anything for leaves."""


class Draft(NamedTuple):
    """Candidates of one step, node 0 being the root."""

    ids: Tensor
    """[B, N] the token of each node."""
    topology: Topology
    """How the N nodes hang together, on the device of `ids`: in each row, or in all of them alike."""
    proposal: Proposal | None = None
    """What the ids were drawn from; `None` where they were chosen and not drawn, as the heads' best guesses are."""


class Drafter(Protocol):
    """Whatever can guess ahead. It never decides: acceptance does."""

    def propose(self, frontier: Frontier) -> Draft:
        """A draft whose root is `frontier.root`."""
        ...
