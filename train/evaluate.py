"""The accuracy of heads on texts: how often the backbone's own token is among a head's best guesses.

Guesses are compared with the backbone's greedy continuation, not with the dataset's text, because acceptance compares
with it too. In a text that the backbone wrote greedily, the rest of the text is that continuation at every position.

Shapes: K heads, P positions, T tokens, C positions in a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.backbone import Backbone
from medusa.heads.guesses import ranks_of
from medusa.heads.independent import MedusaHeads
from medusa.heads.inputs import HeadInputs
from medusa.vocabulary import lm_head_for, token_ids
from train.guess_counts import TOPS, GuessCounts, HeadAccuracy
from train.loss.chunks import chunk_rows
from train.loss.labels import IGNORE, head_labels


class OwnText(NamedTuple):
    """A prompt and the backbone's own greedy continuation of it."""

    input_ids: list[int]
    prompt_tokens: int


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of each head, and the number of positions at which it was measured (`tokens`)."""

    heads: list[HeadAccuracy]
    tokens: int

    def to_dict(self) -> dict[str, object]:
        """The accuracy as a JSON object, as `medusa evaluate --json` writes it."""
        return asdict(self)


@torch.no_grad()
def head_accuracy(backbone: Backbone, heads: MedusaHeads, texts: Iterable[OwnText]) -> Accuracy:
    """Measure the accuracy of all heads on texts that the backbone continued greedily.

    In each text, positions run from the prompt's last token, where decoding starts, to the last position at which
    every head has a label. All heads are therefore measured at the same positions.
    """
    counts = GuessCounts(heads.config.num_heads)
    for text in texts:
        ids = torch.tensor([text.input_ids], device=backbone.device)
        ranks = guess_ranks(backbone, heads, ids, text.prompt_tokens)  # [K, P]
        counts.add(ranks, torch.ones_like(ranks, dtype=torch.bool))
    return Accuracy(counts.figures(), int(counts.labels[0]))


def guess_ranks(backbone: Backbone, heads: MedusaHeads, ids: Tensor, prompt_tokens: int) -> Tensor:
    """For each head, find the rank of the right token among the guesses of the head, from the prompt's end on.

    Args:
        ids: [1, T] the T token ids of the prompt and its continuation.
        prompt_tokens: number of tokens in the prompt.

    Returns:
        The ranks [K, P] for K heads at P positions, from 0; `MISSED` for a token outside the head's ten best guesses.
    """
    labels = head_labels(ids, torch.ones_like(ids), torch.zeros_like(ids), heads.config.num_heads)[:, 0]  # [K, T]
    usable = (labels != IGNORE).all(0)
    usable[: max(prompt_tokens - 1, 0)] = False
    where = usable.nonzero()[:, 0]
    hidden = backbone.hidden_states(ids, use_cache=False)
    return label_ranks(backbone, heads, heads.inputs(hidden, ids, backbone.embed, place=where), labels[:, where])


def label_ranks(backbone: Backbone, heads: MedusaHeads, inputs: HeadInputs, labels: Tensor) -> Tensor:
    """Find the rank of each label among its head's guesses, for K heads at P positions.

    Args:
        inputs: inputs of the heads at the P positions.
        labels: [K, P] token ids.

    Returns:
        The ranks [K, P], from 0; `MISSED` for a label that is not among the head's best ten guesses.
    """
    ranks, lm_head = [], lm_head_for(heads, backbone)
    rows = chunk_rows(len(labels), backbone.vocab_size, inputs.hidden.device.type)
    features = heads.features(inputs)
    for part, wanted in zip(features.split(rows, dim=1), labels.split(rows, dim=1), strict=True):
        logits = heads.logits(part, lm_head)
        guesses = token_ids(heads, logits.topk(min(max(TOPS), logits.shape[-1]), -1).indices)  # [K, C, top]
        ranks.append(ranks_of(wanted, guesses))
    return torch.cat(ranks, dim=1)
