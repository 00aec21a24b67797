"""Head accuracy: how often each head's best guesses hold the backbone's own token.

The reference is the backbone's own continuation, not the dataset's text, because acceptance compares with it. In a text
that the backbone wrote greedily, the rest of the text is its greedy continuation from every position.

Shapes: K heads, P positions, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads.guesses import accepted, ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, token_ids
from train.loss.chunks import chunk_rows
from train.loss.labels import IGNORE, head_labels

TOPS = (1, 5, 10)


class OwnText(NamedTuple):
    """A prompt and the backbone's own greedy continuation of it."""

    input_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True)
class HeadAccuracy:
    """How often the guesses of one head are right."""

    head: int
    """Number of the head, from 1."""
    top: dict[str, float]
    """Share of labels among the head's best 1, 5 and 10 guesses."""
    conditional_top1: float
    """Share of labels that are the head's best guess, where the best guesses of all heads before it are right."""


@dataclass(frozen=True)
class Accuracy:
    """How often the guesses of all heads are right, over `tokens` positions."""

    heads: list[HeadAccuracy]
    tokens: int

    def to_dict(self) -> dict[str, object]:
        """The JSON form, as `medusa evaluate --json` writes it."""
        return asdict(self)


class GuessCounts:
    """Counts of right guesses. All of them are sums, so counts of batches and processes add up.

    The expected tau of a tree is one plus the mean number of guesses accepted, over all positions. It treats all
    positions as equally likely starts of a step. In decoding, a step starts at the end of the last one; `medusa
    benchmark` measures that tau. The expected tau needs no decoding and rises and falls with it.
    """

    def __init__(self, num_heads: int, tree: Tree | None = None) -> None:
        self.tree = tree
        self.hits = torch.zeros(num_heads, max(TOPS), dtype=torch.float64)  # labels by rank
        self.labels = torch.zeros(num_heads, dtype=torch.float64)
        self.given = torch.zeros(num_heads, dtype=torch.float64)  # positions where all heads before were right
        self.chained = torch.zeros(num_heads, dtype=torch.float64)  # positions where this head was right, too
        self.walks = torch.zeros(2, dtype=torch.float64)  # accepted guesses, positions

    def add(self, ranks: Tensor, taught: Tensor) -> None:
        """Count guesses. Chains of heads are counted at positions where all heads have a label.

        Args:
            ranks: [K, P] of the labels (`label_ranks`).
            taught: [K, P] True where there is a label.
        """
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
        """Replace each count by the sum over all processes."""
        for name in ("hits", "labels", "given", "chained", "walks"):
            setattr(self, name, over_processes(getattr(self, name)))

    def figures(self) -> list[HeadAccuracy]:
        """The accuracy of each head."""
        within = (self.hits.cumsum(1) / self.labels.clamp_min(1)[:, None]).tolist()
        chained = (self.chained / self.given.clamp_min(1)).tolist()
        return [
            HeadAccuracy(head, {str(top): round(shares[top - 1], 4) for top in TOPS}, round(chain, 4))
            for head, (shares, chain) in enumerate(zip(within, chained, strict=True), 1)
        ]

    @property
    def expected_tau(self) -> float:
        """Tokens per step with `tree`, including the root."""
        return float(1 + self.walks[0] / self.walks[1].clamp_min(1))


@torch.no_grad()
def head_accuracy(backbone: Backbone, heads: MedusaHeads, texts: Iterable[OwnText]) -> Accuracy:
    """The accuracy of all heads on texts that the backbone wrote greedily.

    Counting starts at the prompt's last token, where the first step can start. It ends at the last position with a
    label for every head, so all heads count the same positions.
    """
    counts = GuessCounts(heads.config.num_heads)
    for text in texts:
        ids = torch.tensor([text.input_ids], device=backbone.device)
        ranks = guess_ranks(backbone, heads, ids, text.prompt_tokens)  # [K, P]
        counts.add(ranks, torch.ones_like(ranks, dtype=torch.bool))
    return Accuracy(counts.figures(), int(counts.labels[0]))


def guess_ranks(backbone: Backbone, heads: MedusaHeads, ids: Tensor, prompt_tokens: int) -> Tensor:
    """Ranks [K, P] of the tokens of a text [1, T] among each head's guesses; `MISSED` if not among the best ten."""
    labels = head_labels(ids, torch.ones_like(ids), torch.zeros_like(ids), heads.config.num_heads)[:, 0]  # [K, T]
    usable = (labels != IGNORE).all(0)
    usable[: max(prompt_tokens - 1, 0)] = False
    where = usable.nonzero()[:, 0]
    hidden = backbone.hidden_states(ids, use_cache=False)
    return label_ranks(backbone, heads, heads.inputs(hidden, ids, backbone.embed, place=where), labels[:, where])


def label_ranks(backbone: Backbone, heads: MedusaHeads, inputs: HeadInputs, labels: Tensor) -> Tensor:
    """Ranks [K, P] of labels [K, P] among their head's guesses; `MISSED` if not among the best ten."""
    ranks, lm_head = [], lm_head_for(heads, backbone)
    rows = chunk_rows(len(labels), backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs)
    for part, wanted in zip(features.split(rows, dim=1), labels.split(rows, dim=1), strict=True):
        logits = heads.logits(part, lm_head)
        guesses = token_ids(heads, logits.topk(min(max(TOPS), logits.shape[-1]), -1).indices)  # [K, C, top]
        ranks.append(ranks_of(wanted, guesses))
    return torch.cat(ranks, dim=1)
