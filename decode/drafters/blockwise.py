"""Blockwise parallel decoding (Stern et al. 2018): heads guess a token each, a chain that the backbone checks at once.

With the exact rules the text is the backbone's own; `acceptance topk:K` and `distance:D` are the lossy ones of their
section 5 (`decode.accept`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from decode.draft import DrafterConfig, DrafterContext, DrafterFactory
from decode.drafters import require_at_least, require_no_tree
from decode.drafters.trained_heads import TrainedHeads, require_heads
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree


@dataclass(frozen=True)
class BlockwiseConfig(DrafterConfig):
    """A chain of the heads' best guesses."""

    tokens: int = 0
    """How far ahead is drafted; 0: as far as there are heads."""

    needs_heads = True
    compiles = True
    can_draw = True

    def __post_init__(self) -> None:
        require_at_least(0, "blockwise", tokens=self.tokens)

    def layouts(self, heads: MedusaHeads, tree: Any = None, stop_drafting: float = 0.0) -> tuple[Tree]:
        count = heads.config.num_heads
        if self.tokens > count:
            raise RequestError(f"drafter blockwise: tokens is {self.tokens}, but there are {count} heads")
        return (Tree.chain(self.tokens or count),)

    def source(self, materials: DrafterContext) -> DrafterFactory:
        require_no_tree(materials.tree, materials.stop_drafting)
        heads = require_heads(materials)
        return TrainedHeads(heads, *self.layouts(heads))
