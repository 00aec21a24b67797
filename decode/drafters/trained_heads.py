"""Drafters with trained heads: on a tree (`--drafter heads`), on a chain (`blockwise`), and the model's own (`mtp`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name

import torch
from transformers import PretrainedConfig, PreTrainedModel

from decode.draft import Drafter
from decode.drafters.base import DrafterConfig, DrafterContext, DrafterFactory, require_at_least
from decode.drafters.layouts import Layout, TreeLike, resolve_tree
from decode.session import Session
from decode.target import Target
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.kind import BLOCK_TRELLIS, LEVELS, TREE, TRELLIS
from medusa.memory import bytes_of
from medusa.native_layers import native_config, native_heads
from medusa.tree import Tree

HEADS_DRAFTERS = {
    TREE: "decode.drafters.heads:HeadsDrafter",
    LEVELS: "decode.drafters.levelwise:PathDrafter",
    TRELLIS: "decode.drafters.trellis:TrellisDrafter",
    BLOCK_TRELLIS: "decode.drafters.block_trellis:BlockTrellisDrafter",
}
"""The drafters of trained heads, which all are made from heads, backbone, tree and target."""


@dataclass(frozen=True)
class HeadsDrafterConfig(DrafterConfig):
    """`--drafter heads`: trained heads draft a tree, which `--tree` sets. There are no other options."""

    needs = "trained heads"
    needs_heads = True
    takes_tree = True
    compiles = True
    can_draw = True

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Layout]:
        return (resolve_tree(tree, heads, stop_drafting),)

    def factory(self, context: DrafterContext) -> DrafterFactory:
        heads = context.heads
        if not isinstance(heads, MedusaHeads):
            raise RequestError(f"the heads are {heads!r}; pass MedusaHeads (medusa_heads= inside model.generate)")
        return TrainedHeads(heads, *self.layouts(heads, context.tree, context.stop_drafting))


@dataclass(frozen=True)
class BlockwiseConfig(HeadsDrafterConfig):
    """`--drafter blockwise`: blockwise parallel decoding (Stern et al. 2018), a chain of the heads' best guesses.

    The lossy rules of that paper's section 5 are `--acceptance topk:K` and `--acceptance distance:D` (`decode.rules`).
    """

    tokens: int = 0  # number of tokens to draft; 0: one per head
    takes_tree = False

    def __post_init__(self) -> None:
        require_at_least(0, "blockwise", tokens=self.tokens)

    def layouts(self, heads: MedusaHeads, tree: TreeLike = None, stop_drafting: float = 0.0) -> tuple[Tree]:
        count = heads.config.num_heads
        if self.tokens > count:
            raise RequestError(
                f"drafter blockwise: tokens is {self.tokens}, but there are {count} heads; give at most {count}"
            )
        return (Tree.chain(self.tokens or count),)


@dataclass(frozen=True)
class MtpConfig(HeadsDrafterConfig):
    """`--drafter mtp`: the model's own layer for multi-token prediction drafts a tree (`medusa.heads.mtp`)."""

    tokens: int = 3  # tokens to draft on a path, each by one run of the layer; the most levels of `--tree`

    first = "tokens"
    needs = "a model with an MTP layer"
    needs_heads = False

    def __post_init__(self) -> None:
        require_at_least(1, "mtp", tokens=self.tokens)

    def own_heads(self, model: PreTrainedModel) -> MedusaHeads:
        return native_heads(model, self.tokens)

    def planned_heads(self, config: PretrainedConfig) -> MedusaHeads:
        with torch.device("meta"):
            return MedusaHeads.from_config(native_config(config, self.tokens))

    def factory(self, context: DrafterContext) -> DrafterFactory:
        return super().factory(context._replace(heads=self.own_heads(context.model)))


class TrainedHeads(DrafterFactory):
    """A factory of drafters that share trained `heads` and a `tree`, which the heads' guesses fill."""

    heads: MedusaHeads
    tree: Layout

    def __init__(self, heads: MedusaHeads, tree: Layout) -> None:
        self.heads, self.tree = heads, tree
        self.num_nodes, self.num_bytes, self.can_draw = tree.num_nodes, bytes_of(heads), heads.can_draw

    def start(self, session: Session, drawn: bool = False) -> Drafter:
        return heads_drafter(self.heads, session.backbone, self.tree, session.target if drawn else None)

    def reshaped(self, change: Callable[[Layout], Layout]) -> TrainedHeads:
        return TrainedHeads(self.heads, change(self.tree))


def heads_drafter(heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> Drafter:
    """Make the drafter that fills `tree` with guesses of `heads`. With a `target`, the drafter samples its drafts.

    The kind of heads names the drafter (`Kind.drafts_by`): one of `HEADS_DRAFTERS`, or the place of a class."""
    name = heads.drafts_by(heads.config)
    make: Callable[..., Drafter] = resolve_name(HEADS_DRAFTERS.get(name, name))
    return make(heads, backbone, tree, target)
