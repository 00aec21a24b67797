"""What crosses from proposing to verifying: candidate ids with their topology, and who can propose them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from decode.topology import Topology
from medusa.heads.context_kv import ContextKV
from medusa.memory import bytes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from decode.loop import Session
    from medusa.heads.independent import MedusaHeads
    from medusa.tree import Layout


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
    context_kv: ContextKV | None = None
    """The text before, for heads that look back at it."""


class Proposal(NamedTuple):
    """The distributions that a sampled draft was drawn from: siblings in order, without replacement.

    M of them, which rows and nodes with the same past share.
    """

    q: Tensor
    """[M, V] draft probabilities."""
    of_children: Tensor
    """[B, N] which of them the children of each node were drawn from; anything for leaves."""


class SideBranch(NamedTuple):
    """Nodes under the root that are read along in the forward that verifies a draft, and never accepted.

    For drafters that want to know what the backbone says behind texts of their own making (`lookahead`).
    """

    ids: Tensor
    """[B, M] the token of each node, without the root."""
    topology: Topology
    """How the root and the M nodes hang together."""
    on_logits: Callable[[Tensor], None]
    """Called with the backbone's logits [B, M, V] behind them, in every forward that reads them."""


class Draft(NamedTuple):
    """Candidates of one step, node 0 being the root."""

    ids: Tensor
    """[B, N] the token of each node."""
    topology: Topology
    """How the N nodes hang together, on the device of `ids`: in each row, or in all of them alike."""
    proposal: Proposal | None = None
    """What the ids were drawn from; `None` where they were chosen and not drawn, as the heads' best guesses are."""
    side_branches: tuple[SideBranch, ...] = ()
    """What else is to be read: the verifier's business alone, acceptance never sees it."""

    @property
    def whole(self) -> Draft:
        """The candidates, and behind them what stands aside, as one tree: what a forward reads."""
        ids, topology = self.ids, self.topology
        for aside in self.side_branches:
            ids, topology = torch.cat([ids, aside.ids], dim=1), topology.beside(aside.topology)
        return Draft(ids, topology)


class Drafter(Protocol):
    """Whatever can guess ahead. It never decides: acceptance does.

    A drafter that needs the text reads it from the session's `Sequences`: by the time it is asked, they hold all that
    was accepted, the root being the last token of each row. Nothing else is told to it.
    """

    def propose(self, frontier: Frontier) -> Draft:
        """A draft whose root is `frontier.root`."""
        ...


class DrafterFactory(ABC):
    """Where drafters come from: models loaded and options checked, to be started for every batch of texts."""

    heads: MedusaHeads | None = None
    """Those that draft, whose layers may read the text along."""
    can_draw: bool = False
    """Whether guesses can be drawn from distributions of its own (`draft sample`)."""
    warm_up: int = 0
    """Steps that it has to see before it has much to say, for whoever wants to try it."""

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """Of the largest draft, root included, and of what stands aside."""

    @abstractmethod
    def start(self, session: Session, drawn: bool = False) -> Drafter:
        """A drafter for the texts of `session`; `drawn`: its guesses are to be drawn."""

    @property
    def num_bytes(self) -> int:
        """Of what it keeps beside the backbone, weights and tables; not of what grows with a text."""
        return 0 if self.heads is None else bytes_of(self.heads)

    def reshaped(self, change: Callable[[Layout], Layout]) -> DrafterFactory:
        """The same with another tree, where it has one."""
        return self


class DrafterContext(NamedTuple):
    """What sources are made of."""

    model: PreTrainedModel
    """The backbone's model."""
    heads: MedusaHeads | None = None
    tree: Any = None
    """What the heads' guesses are laid out on (`decode.request.TreeLike`)."""
    tokenizer: Any = None
    """The backbone's, to tell a draft model's from it; ids alone are compared without one."""
    name: str = "the backbone"
    trust_remote_code: bool = False
    stop_drafting: float = 0.0
    """Of a dynamic tree of the heads."""


class DrafterConfig(ABC):
    """A drafter as it was asked for, `NAME[:options]`, before anything is loaded.

    Plans are dataclasses: their fields are the options, and `__post_init__` refuses what cannot be.
    """

    compiles: ClassVar[bool] = False
    """Whether its steps can be compiled whole."""
    can_draw: ClassVar[bool] = False
    """As that of its source."""
    first: ClassVar[str | None] = None
    """The option whose name may be left out."""
    rest: ClassVar[str | None] = None
    """The option that takes all behind the last of the others, commas included."""

    @property
    def needs_heads(self) -> bool:
        return False

    @property
    def needs(self) -> str:
        """In words: what must be there before."""
        return "trained heads" if self.needs_heads else "nothing"

    @property
    def takes_tree(self) -> bool:
        """Whether its heads' guesses are laid out on a tree that the user chooses."""
        return False

    def check(self, config: PretrainedConfig) -> None:
        """Look at the backbone's configuration, before its weights are loaded.

        Raises:
            RequestError: this drafter cannot draft for it."""
        return

    def layouts(self, heads: MedusaHeads, tree: Any = None, stop_drafting: float = 0.0) -> tuple[Layout, ...]:
        """What the guesses of `heads` will be laid out on; `tree` and `stop_drafting` as in `DrafterContext`.

        Raises:
            RequestError: these heads have no such tree."""
        return ()

    @abstractmethod
    def source(self, materials: DrafterContext) -> DrafterFactory:
        """
        Raises:
            RequestError: something that it needs is missing or does not fit."""
