"""The accuracy of heads on texts: how often the right token is among a head's best guesses.

`medusa evaluate` compares guesses with the backbone's greedy continuation, not with the dataset's text: greedy decoding
accepts only guesses that equal it. Shapes: K heads, P positions, T tokens, C positions in a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads.guesses import accepted, ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.tree import Tree
from medusa.vocabulary import lm_head_for, token_ids
from train.loss.targets import IGNORE, chunk_rows, head_labels

TOPS = (1, 5, 10)


@dataclass(frozen=True)
class HeadAccuracy:
    """One head's accuracy: how often its guesses are right, at all positions and where all earlier heads are right."""

    head: int  # counted from 1
    top: dict[str, float]
    """Share of labels that are among the head's best 1, 5 and 10 guesses, with the keys "1", "5" and "10"."""
    conditional_top1: float
    """Share of labels that are the head's best guess, at positions where those of all earlier heads are right."""


class GuessCounts:
    """Counts of the heads' right guesses, added up over batches and processes.

    The expected tau (tokens per decoding step) of `tree` is one plus the mean number of guesses that it accepts, over
    the positions where every head has a label. Decoding starts steps at only some of them, so its tau can differ."""

    def __init__(self, num_heads: int, tree: Tree | None = None) -> None:
        self.tree = tree
        self.hits = torch.zeros(num_heads, max(TOPS), dtype=torch.float64)  # labels by their rank among the guesses
        self.labels = torch.zeros(num_heads, dtype=torch.float64)
        self.chained = torch.zeros(num_heads + 1, dtype=torch.float64)  # positions where the first 0, 1, ... are right
        self.accepted = torch.zeros((), dtype=torch.float64)  # guesses that the tree accepts

    def add(self, ranks: Tensor, labelled: Tensor) -> None:
        """Count right guesses by the ranks [K, P] of `label_ranks`; `labelled` [K, P]: where there is a label."""
        ranks, labelled = ranks.cpu(), labelled.cpu()
        for rank in range(max(TOPS)):
            self.hits[:, rank] += ((ranks == rank) & labelled).sum(1)
        self.labels += labelled.sum(1)
        whole = ranks[:, labelled.all(0)]  # the conditional accuracies and tau need labels of all heads
        self.chained[0] += whole.shape[1]
        self.chained[1:] += (whole == 0).long().cumprod(0).sum(1)
        if self.tree is not None:
            self.accepted += accepted(self.tree, whole.T).sum()

    def reduce(self, over_processes: Callable[[Tensor], Tensor]) -> None:
        """Replace each count by its sum over all processes, which the function `over_processes` computes."""
        for name in ("hits", "labels", "chained", "accepted"):
            setattr(self, name, over_processes(getattr(self, name)))

    def figures(self) -> list[HeadAccuracy]:
        """Compute the accuracy of each head from the counts."""
        within = (self.hits.cumsum(1) / self.labels.clamp_min(1)[:, None]).tolist()
        chained = (self.chained[1:] / self.chained[:-1].clamp_min(1)).tolist()
        return [
            HeadAccuracy(head, {str(top): round(shares[top - 1], 4) for top in TOPS}, round(chain, 4))
            for head, (shares, chain) in enumerate(zip(within, chained, strict=True), 1)
        ]

    @property
    def expected_tau(self) -> float:
        """Expected tau (tokens per decoding step) of `self.tree`: one plus the mean number of accepted guesses."""
        return float(1 + self.accepted / self.chained[0].clamp_min(1))


class OwnText(NamedTuple):
    """A prompt and the backbone's own greedy continuation of it."""

    input_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of each head, and `tokens`, the number of positions at which the accuracy was measured."""

    heads: list[HeadAccuracy]
    tokens: int


@torch.no_grad()
def head_accuracy(backbone: Backbone, heads: MedusaHeads, texts: Iterable[OwnText]) -> Accuracy:
    """Measure the accuracy of all heads on texts that the backbone continued greedily.

    Positions run from a prompt's last token, where decoding starts, to the last one at which every head has a label."""
    counts = GuessCounts(heads.config.num_heads)
    for text in texts:
        ids = torch.tensor([text.input_ids], device=backbone.device)  # [1, T]
        labels = head_labels(ids, torch.ones_like(ids), torch.zeros_like(ids), heads.config.num_heads)[:, 0]  # [K, T]
        usable = (labels != IGNORE).all(0)
        usable[: max(text.prompt_tokens - 1, 0)] = False
        where = usable.nonzero()[:, 0]
        inputs = heads.inputs(backbone.hidden_states(ids, use_cache=False), ids, backbone.embed, place=where)
        counts.add(label_ranks(backbone, heads, inputs, labels[:, where]), labels[:, where] != IGNORE)
    return Accuracy(counts.figures(), int(counts.labels[0]))


def label_ranks(backbone: Backbone, heads: MedusaHeads, inputs: HeadInputs, labels: Tensor) -> Tensor:
    """Find the ranks [K, P] of labels [K, P] among the ten best guesses of K heads at P positions.

    The best guess has rank 0; a label that is not among the ten has the rank `MISSED`, a large number."""
    ranks, lm_head = [], lm_head_for(heads, backbone)
    rows = chunk_rows(len(labels), backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs)
    for part, wanted in zip(features.split(rows, dim=1), labels.split(rows, dim=1), strict=True):
        logits = heads.logits(part, lm_head)
        guesses = token_ids(heads, logits.topk(min(max(TOPS), logits.shape[-1]), -1).indices)  # [K, C, top]
        ranks.append(ranks_of(wanted, guesses))
    return torch.cat(ranks, dim=1)
