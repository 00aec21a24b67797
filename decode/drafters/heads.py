"""A drafter with independent Medusa heads, whose guesses fill a tree (Medusa paper, section 2.1.2).

Shapes: B rows of a batch (texts), k heads (a tree of depth k uses the first k), V vocabulary, C distinct texts."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.draft import Draft, Frontier, Proposal
from decode.drafters.layouts import DynamicTree, Layout, require_draftable
from decode.ops.draws import Draws, draw_distinct
from decode.ops.fast_linear import prepare_linear
from decode.ops.fast_topk import top_k
from decode.target import Target
from decode.topology import Topology, chosen_part
from medusa.backbone import Backbone
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import SelectedRows, lm_head_for, over_all, require_embeddings, token_ids


class UsesHeads:
    """What the drafters of all kinds of trained heads share: how the heads read the text, and their LM head."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        """Make a drafter that fills `tree`; raises a `RequestError` if heads, backbone and tree do not match."""
        require_draftable(heads.config, backbone.hidden_size, backbone.vocab_size, tree, target is not None)
        require_embeddings(heads, backbone)
        self.heads, self.backbone, self.target = heads, backbone, target
        device = backbone.head_weight.device
        if device.type != "meta" and {heads.device.type, device.type} > {"cpu"}:  # "meta": it is offloaded
            way_out = f'heads.to("{device}", {backbone.dtype})'
            warnings.warn(f"drafts go between {device} and the heads on {heads.device}; {way_out}", stacklevel=2)
        self.lm_head, self.tree = lm_head_for(heads, backbone), tree.to(backbone.device)
        prepare_linear(heads)
        if isinstance(self.lm_head, SelectedRows):
            prepare_linear(self.lm_head.rows)

    def refresh(self) -> None:
        if isinstance(self.lm_head, SelectedRows):
            self.lm_head.refresh()

    def hidden(self, frontier: Frontier) -> Tensor:
        """The hidden states [B, H] before the roots, in the heads' dtype: float32 heads fit any backbone."""
        return frontier.hidden.to(self.heads.device, self.heads.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens [...] that the heads read."""
        return self.heads.embed(tokens, self.backbone.embed)


class HeadsDrafter(UsesHeads):
    """Drafts a tree with independent heads, which all read the hidden state of the token before the root.

    A node at depth d holds one of head d's best guesses, whatever tokens its ancestors hold. With a `target` the draft
    is sampled: the children of a node are draws, in order and without replacement, from their head's distribution."""

    def __init__(self, heads: MedusaHeads, backbone: Backbone, tree: Layout, target: Target | None = None) -> None:
        super().__init__(heads, backbone, tree, target)
        if isinstance(self.tree, DynamicTree):
            self.tree.prepare()
        static = self.tree.candidates  # the draft itself, or what a dynamic tree chooses from
        self.topology, self.depth, self.top = Topology.of(static), static.max_depth, static.max_rank + 1
        # Node n > 0 holds guess rank[n] of head depth[n]; this is its place in the flattened [k, top] table of guesses.
        self.place = (static.depth[1:] - 1) * self.top + static.rank[1:]

    def propose(self, frontier: Frontier) -> Draft:
        """Propose a tree for each text of the batch: the heads' guesses below the root, which is already decided."""
        root = frontier.root
        if self.depth == 0:
            return Draft(root[:, None], self.topology)
        if self.target is not None:
            return self.draw(frontier, self.target, self.target.draws.of(frontier.rows))
        logits = self.logits(frontier)
        if isinstance(self.tree, DynamicTree):
            logits = self.tree.log_confidences(logits)
        best = top_k(logits, self.top)
        guesses = token_ids(self.heads, best.indices).to(root.device).transpose(0, 1).flatten(1)  # [B, k * top]
        if not isinstance(self.tree, DynamicTree):
            return Draft(torch.cat([root[:, None], guesses.index_select(1, self.place)], dim=1), self.topology)
        log_probs = self.tree.path_log_probs(best.values.transpose(0, 1).to(root.device))
        chosen = self.tree.most_probable(log_probs)
        ids = guesses.gather(1, self.place[chosen[:, 1:] - 1])
        ids = torch.cat([root[:, None], ids], dim=1)
        return Draft(ids, chosen_part(self.tree.candidates, chosen), log_probs=log_probs.gather(1, chosen))

    def logits(self, frontier: Frontier) -> Tensor:
        """Logits [k, B, V] of the first k heads for B texts. k is the tree's depth, V the heads' vocabulary size."""
        root = self.embed(frontier.root[:, None]) if self.heads.reads_root else None
        return self.heads(HeadInputs(self.hidden(frontier), root, frontier.context_kv), self.lm_head, self.depth)

    def draw(self, frontier: Frontier, target: Target, draws: Draws, copies: int = 1) -> Draft:
        """Sample `copies` independent drafts for each text in `frontier` from the heads' distributions."""
        logits = over_all(self.heads, self.logits(frontier), self.backbone.vocab_size)
        root = frontier.root.repeat_interleave(copies)
        q = target.draft_probabilities(frontier.rows, logits.transpose(0, 1)).to(root.device)  # [rows, k, V]
        context = torch.arange(len(q), device=root.device).repeat_interleave(copies)
        return sampled_draft(root, self.topology, q, context, draws)


def sampled_draft(root: Tensor, topology: Topology, q: Tensor, context: Tensor, draws: Draws) -> Draft:
    """Sample a draft for each of B root tokens. All drafts share the topology; several drafts may be for one text.

    `q` [C, k, V]: the distributions of k heads over V tokens, for C texts. `context` [B]: the index in `q` of the text
    that a draft is for. Draft b draws its tokens at depth d from `q[context[b], d - 1]`; the children of all its nodes
    of a depth hold the same tokens. The decoded text still follows the target distribution, because a path has only
    one node of each depth, and the draws of different depths are independent."""
    everyone, widths, most = torch.arange(len(root), device=root.device), topology.widths, topology.max_children
    u = draws.uniforms(everyone, sum(widths)).split(widths, dim=1)
    drawn = [
        F.pad(draw_distinct(q[:, depth], context, u[depth]), (0, most - u[depth].shape[1])) for depth in range(len(u))
    ]
    depths = topology.depth[0]
    of_node = (depths[1:] - 1) * most + topology.places()[0, 1:]  # the guess that each node holds
    ids = torch.cat([root[:, None], torch.cat(drawn, dim=1).index_select(1, of_node)], dim=1)
    # The children of a node of depth d are drawn from head d + 1, which is row d of q.
    of_children = context[:, None] * q.shape[1] + depths.clamp_max(topology.max_depth - 1)
    return Draft(ids, topology, Proposal(q.flatten(0, 1), of_children))
