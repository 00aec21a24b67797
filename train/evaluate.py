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
from medusa.heads.guesses import accepted, ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, token_ids
from train.labels import IGNORE, head_labels
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
            self.walks += torch.tensor([accepted(self.tree, whole.T).sum(), whole.shape[1]])

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
    """ids [1, T] -> rank of the token that came among each head's guesses [K, M]; `MISSED`: not in the best ten."""
    same = torch.zeros_like(ids)
    labels = head_labels(ids, torch.ones_like(ids), same, heads.config.num_heads)[:, 0]  # [K, T]
    usable = (labels != IGNORE).all(0)
    usable[: max(prompt_tokens - 1, 0)] = False
    where = usable.nonzero()[:, 0]
    hidden = backbone.hidden_states(ids, use_cache=False)
    return label_ranks(backbone, heads, heads.inputs(hidden, ids, backbone.embed, place=where), labels[:, where])


def label_ranks(backbone: Backbone, heads: MedusaHeads, inputs: HeadInputs, labels: Tensor) -> Tensor:
    """labels [K, M] at M positions -> rank of each among its head's guesses [K, M]; `MISSED`: not in the best ten."""
    ranks, lm_head = [], lm_head_for(heads, backbone)
    rows = chunk_rows(len(labels), backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs)
    for part, wanted in zip(features.split(rows, dim=1), labels.split(rows, dim=1), strict=True):
        logits = heads.logits(part, lm_head)
        guesses = token_ids(heads, logits.topk(min(max(TOPS), logits.shape[-1]), -1).indices)  # [K, C, top]
        ranks.append(ranks_of(wanted, guesses))
    return torch.cat(ranks, dim=1)
