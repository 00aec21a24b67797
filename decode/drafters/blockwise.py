"""Blockwise parallel decoding (Stern et al. 2018): every head guesses one token, and the backbone checks the chain.

With the exact rules the text is the backbone's own. The lossy rules of their section 5 are `acceptance topk:K` and
`distance:D` (`decode.accept`).
"""

from __future__ import annotations

from dataclasses import dataclass

from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least, require_no_tree
from decode.drafters.layouts import TreeLike
from decode.drafters.trained_heads import TrainedHeads, require_heads
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree


@dataclass(frozen=True)
class BlockwiseConfig(DrafterConfig):
    """A chain of the heads' best guesses."""

    tokens: int = 0
    """How many tokens to draft; 0: one per head."""

    needs_heads = True
    compiles = True
    can_draw = True

    def __post_init__(self) -> None:
        require_at_least(0, "blockwise", tokens=self.tokens)

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Tree]:
        count = heads.config.num_heads
        if self.tokens > count:
            raise RequestError(f"drafter blockwise: tokens is {self.tokens}, but there are {count} heads")
        return (Tree.chain(self.tokens or count),)

    def factory(self, context: DrafterContext) -> DrafterFactory:
        require_no_tree(context.tree, context.stop_drafting)
        heads = require_heads(context)
        return TrainedHeads(heads, *self.layouts(heads))
