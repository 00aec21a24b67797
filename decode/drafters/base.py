"""How drafters are made: a config holds the options, a factory what was loaded, and a drafter drafts.

DrafterConfig  --factory(context)-->  DrafterFactory  --start(session)-->  Drafter (decode.draft)
NAME:options                          models, tables                       one batch of texts
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from decode.draft import Drafter
from decode.drafters.layouts import TreeLike
from decode.session import Session
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Layout


class DrafterFactory(ABC):
    """Makes drafters for batches of texts, with models that are loaded and options that were checked."""

    num_nodes: int
    """Nodes of the largest draft, including its root and side branches."""
    num_bytes: int = 0
    """Bytes of weights and tables kept in addition to the backbone, without what grows with a text."""
    heads: MedusaHeads | None = None
    """The drafting heads. A session also keeps what these heads read of the text."""
    can_draw: bool = False
    """Whether guesses can be drawn from the drafter's own distributions (`--draft sample`)."""
    warm_up: int = 0
    """Steps that a drafter must see before its guesses are worth measuring."""

    @abstractmethod
    def start(self, session: Session, drawn: bool = False) -> Drafter:
        """Make a drafter for the texts of `session`; with `drawn` its guesses are draws."""

    def reshaped(self, change: Callable[[Layout], Layout]) -> DrafterFactory:
        """The same factory with `change` applied to its tree, or itself if it has no tree."""
        return self


class TextDrafterFactory(DrafterFactory):
    """Makes drafters that read only the texts of a session."""

    def __init__(
        self, num_nodes: int, make: Callable[[Session], Drafter], num_bytes: int = 0, warm_up: int = 0
    ) -> None:
        self.num_nodes, self.make, self.num_bytes, self.warm_up = num_nodes, make, num_bytes, warm_up

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return self.make(session)


class DrafterContext(NamedTuple):
    """The backbone that drafters are made for, and what the heads need."""

    model: PreTrainedModel
    heads: MedusaHeads | None = None
    tree: TreeLike = None
    """The tree for the heads' guesses."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """The backbone's tokenizer; without it, a draft model's vocabulary is compared by its size only."""
    name: str = "the backbone"
    trust_remote_code: bool = False
    stop_drafting: float = 0.0
    """`DynamicTree.min_probability`, for dynamic trees of the heads."""


class DrafterConfig(ABC):
    """The options of a drafter, as in `NAME[:options]`, before anything is loaded.

    Subclasses are dataclasses. Their fields are the options, and `__post_init__` rejects invalid values.
    """

    compiles: ClassVar[bool] = False
    """Whether whole steps can be compiled."""
    can_draw: ClassVar[bool] = False
    first: ClassVar[str | None] = None
    """The option whose name may be left out."""
    rest: ClassVar[str | None] = None
    """The option that takes everything after the other options, commas included."""
    needs: str = "nothing"
    """What the user must have, for tables."""
    needs_heads: bool = False
    takes_tree: bool = False
    """Whether the user chooses the tree for the guesses."""

    def check(self, config: PretrainedConfig) -> None:
        """Check the backbone's configuration, before its weights are loaded.

        Raises:
            RequestError: this drafter cannot draft for such a backbone."""
        return

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Layout, ...]:
        """The trees for the guesses of `heads`; `tree` and `stop_drafting` are as in `DrafterContext`.

        Raises:
            RequestError: these heads cannot fill such a tree."""
        return ()

    @abstractmethod
    def factory(self, context: DrafterContext) -> DrafterFactory:
        """Load what the drafter needs.

        Raises:
            RequestError: something is missing or does not fit."""


DrafterLike = DrafterFactory | DrafterConfig | str | None
"""A drafter as Python's `generate` takes it; `None` means the heads."""


def require_no_tree(tree: TreeLike, stop_drafting: float) -> None:
    """Raise a `RequestError` if a tree or `stop_drafting` was given for a drafter with its own shape."""
    if stop_drafting:
        raise RequestError(
            "stop-drafting works only with dynamic trees of heads; leave it out, or use this drafter's options"
        )
    if tree is not None:
        raise RequestError("a tree can be chosen only for heads; leave it out, or use this drafter's options")


def require_at_least(minimum: int, name: str, /, **options: int) -> None:
    """Raise a `RequestError` if an option of drafter `name` is smaller than `minimum`."""
    for option, value in options.items():
        if value < minimum:
            raise RequestError(f"drafter {name}: {option} is {value}; it must be at least {minimum}")
