"""Medusa heads as a drafter: the heads' top-k guesses, laid out on a static tree (paper section 2.1.2)."""

from __future__ import annotations

import torch

from decode.draft import Draft, Frontier
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.heads import MedusaHeads
from medusa.tree import Tree


class HeadsDrafter:
    """Heads are run at one position only, the one where the last path ended, and only as many as the tree is deep."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Tree) -> None:
        require_match(heads, backbone)
        tree.require_fit(heads.config.num_heads, backbone.vocab_size)
        self.heads, self.lm_head = heads, backbone.lm_head
        self.tree = tree.to(backbone.device)
        self.top = self.tree.max_rank + 1
        # Node n > 0 holds guess rank[n] of head depth[n]: its place in the flattened [k, top] table of guesses.
        self.place = (self.tree.depth[1:] - 1) * self.top + self.tree.rank[1:]

    def propose(self, frontier: Frontier) -> Draft:
        root = frontier.root[:, None]
        if self.tree.max_depth == 0:
            return Draft(root, self.tree)
        logits = self.heads(frontier.hidden, self.lm_head, self.tree.max_depth)  # [k, B, V]
        # A whole sort is not needed, nor is an order among equals; topk sorts its few results.
        guesses = logits.topk(self.top, dim=-1).indices.transpose(0, 1).flatten(1).to(root.device)  # [B, k * top]
        return Draft(torch.cat([root, guesses.index_select(1, self.place)], dim=1), self.tree)


def require_match(heads: MedusaHeads, backbone: Backbone) -> None:
    """Raises:
    RequestError: the heads were made for another hidden size or vocabulary."""
    config = heads.config
    if config.hidden_size != backbone.hidden_size:
        raise RequestError(
            f"the heads have hidden size {config.hidden_size} but the backbone {backbone.hidden_size}; "
            f"they belong to {config.base_model_name_or_path or 'another backbone'}"
        )
    if config.vocab_size not in (None, backbone.vocab_size):
        raise RequestError(
            f"the heads have a vocabulary of {config.vocab_size} but the backbone one of {backbone.vocab_size}; "
            f"they belong to {config.base_model_name_or_path or 'another backbone'}"
        )
