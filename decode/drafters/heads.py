"""Medusa heads as a drafter: the heads' guesses, laid out on a tree (paper section 2.1.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.accept import Draws
from decode.draft import Draft, Frontier, Proposal
from decode.drafters.dynamic_tree import DynamicTree
from decode.ops.fast_topk import top_k
from decode.sampling import Target, draw_distinct
from decode.topology import Topology
from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import Layout
from medusa.vocabulary import lm_head_for, over_all, token_ids


class HeadsDrafter:
    """Heads are run at one position only, the one where the last path ended, and only as many as the tree is deep.

    A node holds a top-r guess of its head, whatever the ranks above it. Of a dynamic tree only the candidates that are
    most probable in this step are drafted. With a `target` the tree is sampled instead: the children of a node, in
    order, are draws without replacement from their head's distribution. Its topology is fixed beforehand; keeping or
    dropping a node by what was drawn would change what it was drawn from.
    """

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Raises:
        RequestError: heads of another size than the backbone, or a tree that they cannot fill or draw."""
        require_draftable(heads.config, backbone, tree, drawn=target is not None)
        self.heads, self.backbone, self.target = heads, backbone, target
        self.lm_head = lm_head_for(heads, backbone)
        self.tree = tree.to(backbone.device)
        # The static tree: the draft itself, or what a dynamic one is chosen from.
        static = self.tree.candidates
        self.static, self.topology = static, Topology.of(static)
        self.top = static.max_rank + 1
        # Node n > 0 holds guess rank[n] of head depth[n]: its place in the flattened [k, top] table of guesses.
        self.place = (static.depth[1:] - 1) * self.top + static.rank[1:]

    def propose(self, frontier: Frontier) -> Draft:
        root = frontier.root
        if self.static.max_depth == 0:
            return Draft(root[:, None], self.topology)
        if self.target is not None:
            return self.draw(frontier, self.target, self.target.draws.of(frontier.rows))
        logits = self.logits(frontier)
        if isinstance(self.tree, DynamicTree):
            logits = self.tree.log_confidences(logits)
        best = top_k(logits, self.top)
        guesses = token_ids(self.heads, best.indices).transpose(0, 1).flatten(1).to(root.device)  # [B, k * top]
        if not isinstance(self.tree, DynamicTree):
            return Draft(torch.cat([root[:, None], guesses.index_select(1, self.place)], dim=1), self.topology)
        chosen, topology = self.tree.choose(self.tree.worth(best.values.transpose(0, 1).to(root.device)))
        ids = guesses.gather(1, self.place[chosen[:, 1:] - 1])
        return Draft(torch.cat([root[:, None], ids], dim=1), topology)

    def logits(self, frontier: Frontier) -> Tensor:
        """Logits [k, B, V] of as many heads as the tree is deep; [k, B, N] where they guess among N tokens."""
        # Heads may be kept in another dtype than the backbone, float32 beside bfloat16 for example.
        inputs = HeadInputs(frontier.hidden.to(self.heads.device, self.heads.dtype))
        return self.heads(inputs, self.lm_head, self.static.max_depth)

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """A draft drawn from the heads' distributions, `copies` times from each row of the frontier."""
        logits = self.logits(frontier)
        logits = over_all(self.heads, logits, self.backbone.vocab_size)
        root = frontier.root.repeat_interleave(copies)
        q = target.draft_probabilities(frontier.rows, logits.transpose(0, 1)).to(root.device)  # [rows, k, V]
        context = torch.arange(len(q), device=root.device).repeat_interleave(copies)
        return sampled_draft(root, self.topology, q, context, draws)


def sampled_draft(root: Tensor, topology: Topology, q: Tensor, context: Tensor, draws: Draws) -> Draft:
    """roots [B] and, per context, what each depth is drawn from, q [C, k, V] -> a draft drawn from it.

    All rows share the topology, and all nodes of a depth draw the same children: nothing in the proof asks them to be
    independent, as a path meets only one of these nodes, and what was drawn at one depth says nothing about the next.
    """
    everyone = torch.arange(len(root), device=root.device)
    depths, place, ids = topology.depth[0], topology.place[0], [root[:, None]]
    for depth in range(1, topology.max_depth + 1):
        order = place[depths == depth]
        u = draws.uniforms(everyone, int(order.max()) + 1)
        drawn = draw_distinct(q[:, depth - 1], context, u)  # [B, siblings at most]
        ids.append(drawn.index_select(1, order))
    # Nodes are sorted by depth. The children of a node of depth d are drawn from head d + 1, which is row d of q.
    of_children = context[:, None] * q.shape[1] + depths.clamp_max(topology.max_depth - 1)
    proposal = Proposal(q.flatten(0, 1), of_children)
    return Draft(torch.cat(ids, dim=1), topology, proposal)


def require_draftable(config: MedusaConfig, backbone: Backbone, tree: Layout, drawn: bool) -> None:
    """Raises:
    RequestError: heads of another size than the backbone, or a tree that they cannot fill or draw."""
    require_sizes(config, backbone.hidden_size, backbone.vocab_size)
    tree.require_fit(config.num_heads, config.draft_vocab_size(backbone.vocab_size))
    if drawn:
        require_drawable(tree)


def require_drawable(tree: Layout) -> None:
    """Raises:
    RequestError: the tree's nodes are chosen by what is drafted, so that it cannot be drawn."""
    if tree.is_dynamic:
        raise RequestError("a dynamic tree cannot be drawn: what was drawn would choose its nodes; use draft topk")


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
