"""Trained heads, of any kind, as `--drafter heads`: the tree is `--tree`, or the one saved with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decode.draft import Drafter, DrafterConfig, DrafterContext, DrafterFactory
from decode.drafters.heads import HeadsDrafter
from decode.drafters.paths import PathDrafter
from decode.loop import Session
from decode.request import resolve_tree
from decode.sampling import Target
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.sequential import SequentialHeads
from medusa.tree import Layout


@dataclass(frozen=True)
class HeadsDrafterConfig(DrafterConfig):
    """No options: shape and number of nodes are the tree's."""

    needs_heads = True
    takes_tree = True
    compiles = True
    can_draw = True

    def layouts(self, heads: MedusaHeads, tree: Any = None, stop_drafting: float = 0.0) -> tuple[Layout]:
        return (resolve_tree(tree, heads, stop_drafting),)

    def source(self, materials: DrafterContext) -> DrafterFactory:
        heads = require_heads(materials)
        return TrainedHeads(heads, *self.layouts(heads, materials.tree, materials.stop_drafting))


class TrainedHeads(DrafterFactory):
    """Heads and the tree that their guesses are laid out on."""

    can_draw = True

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


def require_heads(materials: DrafterContext) -> MedusaHeads:
    """Raises:
    RequestError: there are none."""
    if not isinstance(materials.heads, MedusaHeads):
        given = materials.heads
        raise RequestError(f"the heads are {given!r}; pass MedusaHeads (medusa_heads=... from inside model.generate)")
    return materials.heads


def heads_drafter(
    heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None
) -> HeadsDrafter | PathDrafter:
    """The drafter for these heads; with a `target` it draws.

    Raises:
        RequestError: heads of another shape, or a tree that they cannot fill."""
    if isinstance(heads, SequentialHeads) and heads.follows_path:
        return PathDrafter(heads, backbone, tree, target)
    return HeadsDrafter(heads, backbone, tree, target)
