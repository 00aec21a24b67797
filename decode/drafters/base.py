"""The three forms of a drafter: a config holds options, a factory holds loaded models, and a drafter proposes drafts.

DrafterConfig  --factory(context)-->  DrafterFactory  --start(session)-->  Drafter (decode.draft)
NAME:options                          models, tables                       one batch of texts"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from decode.draft import Drafter
from decode.drafters.layouts import Layout, TreeLike
from decode.session import Session
from medusa.errors import OptionError, RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import MAX_NODES


class DrafterFactory(ABC):
    """Holds the loaded models and tables of a drafter, and makes a drafter for each batch of texts."""

    num_nodes: int  # of the largest draft, including the root and side branches
    num_bytes: int = 0  # of weights and tables, without the backbone and without memory that grows with the text
    tree: Layout | None = None  # the tree of its drafts, if it has one
    heads: MedusaHeads | None = None  # the Medusa heads that draft, if any; a session keeps their KV caches
    can_draw: bool = False  # whether drafts can be sampled from the drafter's own distributions (`--draft sample`)
    warm_up: int = 0  # steps in which the drafter collects guesses; tests of losslessness start after these steps

    @abstractmethod
    def start(self, session: Session, drawn: bool = False) -> Drafter:
        """Make a drafter for the texts of `session`. With `drawn`, the drafter samples drafts (`--draft sample`)."""

    def reshaped(self, change: Callable[[Layout], Layout]) -> DrafterFactory:
        """Return a copy of this factory with `change` applied to its tree, or the factory itself if it has no tree."""
        return self


class DrafterContext(NamedTuple):
    """What a drafter is made from: the backbone with its tokenizer, and Medusa heads with a tree, if there are any."""

    model: PreTrainedModel
    heads: MedusaHeads | None = None
    tree: TreeLike = None  # for drafts of the heads; `None`: the tree saved with the heads, or a default
    tokenizer: PreTrainedTokenizerBase | None = None  # without it, a draft model's vocabulary is compared by size only
    name: str = "the backbone"
    trust_remote_code: bool = False
    stop_drafting: float = 0.0  # path probability below which a dynamic tree of the heads prunes nodes; 0: no pruning


class DrafterConfig(ABC):
    """Base class of a drafter's options, which users write as `NAME[:options]`. Making one loads no models."""

    compiles: ClassVar[bool] = False  # whether `--compile` can compile the steps of this drafter
    can_draw: ClassVar[bool] = False  # whether drafts can be sampled (`DrafterFactory.can_draw`)
    first: ClassVar[str | None] = None  # the option whose name can be left out: `model:demo` means `model:model=demo`
    rest: ClassVar[str | None] = None  # the option whose value is all text after the other options, commas included
    needs: str = "nothing"  # what a user must provide, such as trained heads; tables of results show it
    needs_heads: bool = False
    takes_tree: bool = False  # whether `--tree` sets the tree of this drafter

    def title(self, name: str) -> str:
        """Return what a page calls the drafter, which is registered by `name`."""
        return name

    def check(self, config: PretrainedConfig) -> None:
        """Raise a `RequestError` if the drafter cannot draft for a backbone with this config. No weights are needed."""
        return

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Layout, ...]:
        """Return the trees that the guesses of `heads` fill; empty if this drafter uses no heads.

        `tree` and `stop_drafting`: see `resolve_tree`. Raise a `RequestError` if a tree does not fit the heads."""
        return ()

    def own_heads(self, model: PreTrainedModel) -> MedusaHeads | None:
        """Return heads that the drafter finds in the backbone's own files; `None` if it looks for none."""
        return None

    def planned_heads(self, config: PretrainedConfig) -> MedusaHeads | None:
        """Return the `own_heads` of a backbone with this config, without weights; raise RequestError if it has none."""
        return None

    @abstractmethod
    def factory(self, context: DrafterContext) -> DrafterFactory:
        """Load the drafter's models and tables, or raise a `RequestError` if one is missing or does not fit."""


DrafterLike = DrafterFactory | DrafterConfig | str | None
"""A drafter in any form that `decode.generate` takes: factory, config, description, or `None` for the heads."""


def require_no_tree(tree: TreeLike, stop_drafting: float) -> None:
    """Raise a `RequestError` if `tree` or `stop_drafting` is set; called for drafters that use neither of them."""
    if stop_drafting:
        raise OptionError("stop_drafting", "is for dynamic trees of heads; leave it out, or use the drafter's options")
    if tree is not None:
        raise RequestError("a tree can be chosen only for heads; leave it out, or use this drafter's options")


def require_draftable_nodes(name: str, nodes: int) -> None:
    """Raise a `RequestError` if drafts of the drafter `name` would have so many `nodes`."""
    if nodes > MAX_NODES:
        told = f"a draft has up to {nodes} nodes; at most {MAX_NODES} can be verified in one forward"
        raise RequestError(f"drafter {name}: {told}")


def require_at_least(minimum: int, name: str, /, **options: int) -> None:
    """Raise a `RequestError` if one of the `options` of drafter `name` is smaller than `minimum`."""
    for option, value in options.items():
        if value < minimum:
            raise RequestError(f"drafter {name}: {option} is {value}; it must be at least {minimum}")
