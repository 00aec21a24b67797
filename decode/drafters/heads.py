"""Medusa heads as a drafter: the heads' top-k guesses, laid out on a static tree (paper section 2.1.2)."""

from __future__ import annotations

import torch

from decode.draft import Draft, Frontier
from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads import MedusaHeads
from medusa.tree import Tree


class HeadsDrafter:
    """Heads are run at one position only, the one where the last path ended, and only as many as the tree is deep."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Tree) -> None:
        require_sizes(heads.config, backbone.hidden_size, backbone.vocab_size)
        tree.require_fit(heads.config.num_heads, backbone.vocab_size)
        self.heads, self.backbone = heads, backbone
        self.weight = next(heads.parameters())
        self.tree = tree.to(backbone.device)
        self.top = self.tree.max_rank + 1
        # Node n > 0 holds guess rank[n] of head depth[n]: its place in the flattened [k, top] table of guesses.
        self.place = (self.tree.depth[1:] - 1) * self.top + self.tree.rank[1:]

    def propose(self, frontier: Frontier) -> Draft:
        root = frontier.root[:, None]
        if self.tree.max_depth == 0:
            return Draft(root, self.tree)
        # Heads may be kept in another dtype than the backbone, float32 beside bfloat16 for example.
        features = self.heads.features(frontier.hidden.to(self.weight), self.tree.max_depth)
        if self.heads.lm_heads is None:
            features = features.to(self.backbone.head_weight.dtype)
        logits = self.heads.logits(features, self.backbone.lm_head)  # [k, B, V]
        # A whole sort is not needed, nor is an order among equals; topk sorts its few results.
        guesses = logits.topk(self.top, dim=-1).indices.transpose(0, 1).flatten(1).to(root.device)  # [B, k * top]
        return Draft(torch.cat([root, guesses.index_select(1, self.place)], dim=1), self.tree)


def require_sizes(config: MedusaConfig, hidden_size: int, vocab_size: int) -> None:
    """Raises:
    RequestError: the heads were made for another hidden size or vocabulary."""
    theirs = f"they belong to {config.base_model_name_or_path or 'another backbone'}"
    if config.hidden_size != hidden_size:
        raise RequestError(f"the heads have hidden size {config.hidden_size} but the backbone {hidden_size}; {theirs}")
    if config.vocab_size not in (None, vocab_size):
        raise RequestError(
            f"the heads have a vocabulary of {config.vocab_size} but the backbone one of {vocab_size}; {theirs}"
        )
