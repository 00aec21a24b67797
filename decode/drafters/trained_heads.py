"""Trained heads of any kind, as `--drafter heads`, on the tree of `--tree` or the one saved with the heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode.draft import Drafter
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory
from decode.drafters.heads import HeadsDrafter
from decode.drafters.layouts import TreeLike, resolve_tree
from decode.drafters.paths import PathDrafter
from decode.session import Session
from decode.target import Target
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.sequential import SequentialHeads
from medusa.tree import Layout


@dataclass(frozen=True)
class HeadsDrafterConfig(DrafterConfig):
    """The heads; the tree sets shape and number of nodes, so there are no options."""

    needs_heads = True
    takes_tree = True
    compiles = True
    can_draw = True

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Layout]:
        return (resolve_tree(tree, heads, stop_drafting),)

    def factory(self, context: DrafterContext) -> DrafterFactory:
        heads = require_heads(context)
        return TrainedHeads(heads, *self.layouts(heads, context.tree, context.stop_drafting))


class TrainedHeads(DrafterFactory):
    """Heads, and the tree that their guesses are laid out on."""

    can_draw = True
    compiles = True

    heads: MedusaHeads

    def __init__(self, heads: MedusaHeads, tree: Layout) -> None:
        self.heads, self.tree = heads, tree

    @property
    def num_nodes(self) -> int:
        return self.tree.num_nodes

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return heads_drafter(self.heads, session.backbone, self.tree, session.target if drawn else None)

    def reshaped(self, change: Callable[[Layout], Layout]) -> TrainedHeads:
        return TrainedHeads(self.heads, change(self.tree))


def require_heads(context: DrafterContext) -> MedusaHeads:
    """The heads of `context`.

    Raises:
        RequestError: there are none."""
    if not isinstance(context.heads, MedusaHeads):
        given = context.heads
        raise RequestError(f"the heads are {given!r}; pass MedusaHeads (medusa_heads=... from inside model.generate)")
    return context.heads


def heads_drafter(
    heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None
) -> HeadsDrafter | PathDrafter:
    """The drafter for heads of any kind; with a `target` it draws.

    Raises:
        RequestError: heads of another size than the backbone, or a tree that they cannot fill."""
    if isinstance(heads, SequentialHeads) and heads.follows_path:
        return PathDrafter(heads, backbone, tree, target)
    return HeadsDrafter(heads, backbone, tree, target)
