"""How often each head's top-r guess is the backbone's own token.

The reference is what the backbone itself goes on to write, never the data set's text: that is what acceptance compares
with. In a text that the backbone wrote greedily, the rest of the text is its greedy continuation from every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import MedusaHeads
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, token_ids
from train.labels import IGNORE, following_ids, head_labels
from train.loss import chunk_rows

TOPS = (1, 5, 10)


class OwnText(NamedTuple):
    """A prompt and the backbone's own greedy continuation of it."""

    input_ids: list[int]
    prompt_tokens: int


class GuessCounts:
    """What is counted about guesses: everything is a sum, so counts of batches and processes add up.

    The expected tau of a tree is the mean over positions of one plus the guesses accepted there, as if a step were as
    likely to start at one position as at another. In truth steps start where the last one ended: `medusa benchmark`
    measures that; this costs nothing and moves with it.
    """

    def __init__(self, num_heads: int, tree: Tree | None = None) -> None:
        self.tree = tree
        self.hits = torch.zeros(num_heads, max(TOPS), dtype=torch.float64)  # labels by rank
        self.labels = torch.zeros(num_heads, dtype=torch.float64)
        self.given = torch.zeros(num_heads, dtype=torch.float64)  # positions where all heads before were right ...
        self.chained = torch.zeros(num_heads, dtype=torch.float64)  # ... and this one too
        self.walks = torch.zeros(2, dtype=torch.float64)  # accepted guesses, positions

    def add(self, ranks: Tensor, taught: Tensor) -> None:
        """ranks [K, M] from `guess_ranks` and where there is a label [K, M]; chains count where all heads have one."""
        ranks, taught = ranks.cpu(), taught.cpu()
        for rank in range(max(TOPS)):
            self.hits[:, rank] += ((ranks == rank) & taught).sum(1)
        self.labels += taught.sum(1)
        whole = ranks[:, taught.all(0)]
        right = (whole == 0).long().cumprod(0)  # this head and all before
        self.given += torch.cat([torch.ones_like(right[:1]), right[:-1]]).sum(1)
        self.chained += right.sum(1)
        if self.tree is not None:
            self.walks += torch.tensor([accepted(whole, self.tree).sum(), whole.shape[1]])

    def reduce(self, over_processes: Callable[[Tensor], Tensor]) -> None:
        """Replace each sum by that of all processes."""
        for name in ("hits", "labels", "given", "chained", "walks"):
            setattr(self, name, over_processes(getattr(self, name)))

    def figures(self) -> list[dict[str, Any]]:
        """For each head: its share of labels within the top 1, 5 and 10, and top-1 where all heads before are right."""
        within = self.hits.cumsum(1) / self.labels.clamp_min(1)[:, None]
        return [
            {
                "head": head + 1,
                "top": {str(top): round(float(within[head, top - 1]), 4) for top in TOPS},
                "conditional_top1": round(float(self.chained[head] / self.given[head].clamp_min(1)), 4),
            }
            for head in range(len(within))
        ]

    @property
    def expected_tau(self) -> float:
        """Tokens a step with `tree`, the root included."""
        return float(1 + self.walks[0] / self.walks[1].clamp_min(1))


def accepted(ranks: Tensor, tree: Tree) -> Tensor:
    """ranks [K, M] of the right tokens among the heads' guesses -> depth that the tree reaches at each position [M]."""
    wrong = ranks[tree.depth.clamp_min(1) - 1] != tree.rank[:, None]  # [N, M] this node is not the right token
    wrong[0] = False  # the root is decided
    reached = (tree.ancestors.float() @ wrong.float()) == 0
    return (reached * tree.depth[:, None]).max(0).values


@torch.no_grad()
def head_accuracy(backbone: Backbone, heads: MedusaHeads, texts: Iterable[OwnText]) -> dict[str, Any]:
    """What `medusa evaluate --json` writes: per head top-1, 5 and 10, and top-1 given that all heads before were right.

    Positions from the prompt's last on count: where a step can start. For every head the same positions count, those
    from which the text goes on for as long as the heads reach.
    """
    counts = GuessCounts(heads.config.num_heads)
    for text in texts:
        ids = torch.tensor([text.input_ids], device=backbone.device)
        ranks = guess_ranks(backbone, heads, ids, text.prompt_tokens)  # [K, M]
        counts.add(ranks, torch.ones_like(ranks, dtype=torch.bool))
    return {"heads": counts.figures(), "tokens": int(counts.labels[0])}


def guess_ranks(backbone: Backbone, heads: MedusaHeads, ids: Tensor, prompt_tokens: int) -> Tensor:
    """ids [1, T] -> rank of the token that came among each head's guesses [K, M]; `max(TOPS)`: not among them."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    hidden = heads.read(backbone.hidden_states(ids, use_cache=False).to(next(heads.parameters()).dtype), positions)
    same = torch.zeros_like(ids)
    labels = head_labels(ids, torch.ones_like(ids), same, heads.config.num_heads)[:, 0]  # [K, T]
    start = max(prompt_tokens - 1, 0)
    usable = (labels != IGNORE).all(0)
    usable[:start] = False
    where = usable.nonzero()[:, 0]
    following, behind = None, following_ids(ids, heads.config.num_heads)
    if heads.follows_path:
        following = backbone.embed(behind[0, where]).to(hidden.dtype)
    context_kv = heads.context_kv(hidden, behind[..., 0], backbone.embed, positions, place=where)
    return ranks_of(backbone, heads, hidden[0, where], labels[:, where], following, context_kv)


def ranks_of(
    backbone: Backbone,
    heads: MedusaHeads,
    hidden: Tensor,
    labels: Tensor,
    following: Tensor | None = None,
    context_kv: ContextKV | None = None,
) -> Tensor:
    """hidden [M, H], labels [K, M] -> rank of each label among its head's guesses [K, M]; `max(TOPS)`: not there.

    `following`: [M, K, H] embeddings of the tokens behind each position, for heads that follow the path;
    `context_kv`: the texts before, for those that look back.
    """
    ranks, lm_head = [], lm_head_for(heads, backbone)
    rows = chunk_rows(len(labels), backbone.vocab_size, hidden.device.type)
    features = heads.features(hidden, following=following, context_kv=context_kv)
    for part, wanted in zip(features.split(rows, dim=1), labels.split(rows, dim=1), strict=True):
        logits = heads.logits(part, lm_head)
        guesses = token_ids(heads, logits.topk(min(max(TOPS), logits.shape[-1]), -1).indices)
        match = guesses == wanted[..., None]  # [K, C, top]
        ranks.append(torch.where(match.any(-1), match.int().argmax(-1), max(TOPS)))
    return torch.cat(ranks, dim=1)
