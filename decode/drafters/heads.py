"""Medusa heads as a drafter: the heads' guesses, laid out on a static tree (paper section 2.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.accept import Draws
from decode.draft import Draft, Frontier, Proposal
from decode.sampling import Target, draw_distinct
from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads import MedusaHeads
from medusa.tree import Tree


class HeadsDrafter:
    """Heads are run at one position only, the one where the last path ended, and only as many as the tree is deep.

    A node holds a top-r guess of its head, whatever the ranks above it. With a `target` the tree is sampled instead:
    the children of a node, in order, are draws without replacement from their head's distribution. Its topology is
    fixed beforehand; keeping or dropping a node by what was drawn would change what it was drawn from.
    """

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Tree, target: Target | None = None) -> None:
        require_sizes(heads.config, backbone.hidden_size, backbone.vocab_size)
        tree.require_fit(heads.config.num_heads, backbone.vocab_size)
        self.heads, self.backbone, self.target = heads, backbone, target
        self.tree = tree.to(backbone.device)
        self.top = self.tree.max_rank + 1
        # Node n > 0 holds guess rank[n] of head depth[n]: its place in the flattened [k, top] table of guesses.
        self.place = (self.tree.depth[1:] - 1) * self.top + self.tree.rank[1:]

    def propose(self, frontier: Frontier) -> Draft:
        root = frontier.root
        if self.tree.max_depth == 0:
            return Draft(root[:, None], self.tree)
        logits = head_logits(self.heads, self.backbone, frontier.hidden, self.tree.max_depth)
        if self.target is not None:
            q = self.target.draft_probabilities(frontier.rows, logits.transpose(0, 1)).to(root.device)  # [B, k, V]
            everyone = torch.arange(len(root), device=root.device)
            return sampled_draft(root, self.tree, q, everyone, self.target.draws.of(frontier.rows))
        # A whole sort is not needed, nor is an order among equals; topk sorts its few results.
        guesses = logits.topk(self.top, dim=-1).indices.transpose(0, 1).flatten(1).to(root.device)  # [B, k * top]
        return Draft(torch.cat([root[:, None], guesses.index_select(1, self.place)], dim=1), self.tree)


def head_logits(heads: MedusaHeads, backbone: Backbone, hidden: Tensor, num_heads: int | None = None) -> Tensor:
    """hidden [B, H] of the backbone -> logits [k, B, V] of the first k = `num_heads` heads (all)."""
    # Heads may be kept in another dtype than the backbone, float32 beside bfloat16 for example.
    features = heads.features(hidden.to(next(heads.parameters())), num_heads)
    if heads.lm_heads is None:
        features = features.to(backbone.head_weight.dtype)
    return heads.logits(features, backbone.lm_head)


def sampled_draft(root: Tensor, tree: Tree, q: Tensor, context: Tensor, draws: Draws) -> Draft:
    """roots [B] and, per context, what each depth is drawn from, q [C, k, V] -> a draft drawn from it.

    All nodes of a depth draw the same children: nothing in the proof asks them to be independent, as a path meets only
    one of these nodes, and what was drawn at one depth says nothing about the next.
    """
    everyone = torch.arange(len(root), device=root.device)
    ids = [root[:, None]]
    for depth in range(1, tree.max_depth + 1):
        order = tree.order[tree.depth == depth]
        u = draws.uniforms(everyone, int(order.max()) + 1)
        drawn = draw_distinct(q[:, depth - 1], context, u)  # [B, siblings at most]
        ids.append(drawn.index_select(1, order))
    # Nodes are sorted by depth. The children of a node of depth d are drawn from head d + 1, which is row d of q.
    return Draft(torch.cat(ids, dim=1), tree, Proposal(q, tree.depth.clamp_max(tree.max_depth - 1), context))


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
