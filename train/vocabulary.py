"""The reduced vocabulary of heads: its tokens, and the speed that it is expected to gain.

Heads with a reduced vocabulary (`medusa.vocabulary`) guess among the most frequent tokens of the training text. They
read fewer LM head weights, but they never guess a label outside the vocabulary. Both effects are estimated before
training, with times counted in weights as in `train.architecture`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from train.architecture import OVERHEAD, TREE, BackboneSizes
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.dataset import Features
from train.features.files import PER_TOKEN
from train.loss.labels import IGNORE, head_labels

CHAIN = 0.75  # how often a guess is right after right ones, for the cost of a reduced vocabulary: tau 3.1 of 5
ROWS = 1024  # rows whose labels are counted at a time


def vocabulary_gain(
    sizes: BackboneSizes, *, num_heads: int, blocks: int, lm_heads: int, vocabulary: int, coverage: float
) -> float:
    """Expected speed of heads that guess among `vocabulary` tokens, relative to the same heads with all tokens.

        tau   =  1 + (c q) + (c q)^2 + ... + (c q)^K      q = CHAIN, c = 1 with all tokens
        time  =  TREE (backbone + OVERHEAD) + blocks + lm_heads x vocabulary x H

    Args:
        blocks: parameters of the heads without their LM heads.
        lm_heads: number of LM heads that a step reads: K if heads have their own or work one after the other.
        coverage: c, the share of the labels that are in the vocabulary.
    """

    def speed(tokens: int, known: float) -> float:
        tau = sum((known * CHAIN) ** depth for depth in range(num_heads + 1))
        weights = TREE * (sizes.parameters + OVERHEAD) + blocks + lm_heads * sizes.hidden_size * tokens
        return tau / weights

    return speed(vocabulary, coverage) / speed(sizes.vocab_size, 1.0)


class FrequentTokens(NamedTuple):
    """The most frequent tokens of a text, and their share of the text."""

    ids: Tensor
    """[N] tokens, the most frequent first."""
    coverage: float
    """Share of the labels of one half of the text that are among the other half's most frequent tokens."""


def most_frequent(dataset: PackedDataset | StreamedDataset | Features, size: int, vocab_size: int) -> FrequentTokens:
    """The `size` most frequent labels of a text. Equally frequent ones follow their ids, the tokenizer's own order.

    Raises:
        RequestError: a stream, which has no end, or a `size` that is not smaller than the vocabulary.
    """
    if isinstance(dataset, StreamedDataset):
        raise RequestError(
            "heads.vocabulary is counted on the whole text, and data.streaming has no end; leave one out"
        )
    if size >= vocab_size:
        raise RequestError(
            f"heads.vocabulary is {size}, but the backbone has {vocab_size} tokens; leave it out for all"
        )
    counts = torch.zeros(2, vocab_size, dtype=torch.long)
    for number, labels in enumerate(_labels(dataset)):
        # Rows go to the two halves in turn; a single long row (features on disk) is cut in two.
        halves = (labels[::2], labels[1::2]) if len(labels) > 1 else labels.flatten().chunk(2)
        for half, part in enumerate(halves):
            counts[(half + number) % 2] += torch.bincount(part[part != IGNORE], minlength=vocab_size)
    found = sum(int(counts[1 - half, _first(counts[half], size)].sum()) for half in range(2))
    return FrequentTokens(_first(counts.sum(0), size), found / max(int(counts.sum()), 1))


def _first(counts: Tensor, size: int) -> Tensor:
    return counts.sort(descending=True, stable=True).indices[:size]


def _labels(dataset: PackedDataset | Features) -> Iterator[Tensor]:
    """Labels of the first head in pieces [B, T]; other heads lack only the first tokens of a document."""
    if isinstance(dataset, PackedDataset):
        whole = {name: getattr(dataset, name) for name in PER_TOKEN}
        starts = range(0, len(dataset), ROWS)
        pieces = [{name: column[start : start + ROWS] for name, column in whole.items()} for start in starts]
    else:
        pieces = [{name: shard[name][None] for name in PER_TOKEN} for shard in dataset.tokens]
    for piece in pieces:
        yield head_labels(piece["input_ids"].long(), piece["loss_mask"], piece["document_ids"].long(), 1)[0]


def require_worthwhile(heads: MedusaHeads, model: PreTrainedModel, coverage: float, force: bool) -> str:
    """Estimate the gain of the heads' vocabulary, and describe it in a line.

    Raises:
        RequestError: the vocabulary is expected to slow decoding down, and `force` is not set.
    """
    config = heads.config
    assert config.vocabulary is not None
    assert config.vocab_size is not None
    of_lm_heads = 0 if heads.lm_heads is None else heads.lm_heads.numel()
    gain = vocabulary_gain(
        BackboneSizes(config.hidden_size, config.vocab_size, sum(p.numel() for p in model.parameters())),
        num_heads=config.num_heads,
        blocks=heads.num_parameters - of_lm_heads,
        lm_heads=config.num_heads if heads.lm_heads is not None or heads.follows_path else 1,
        vocabulary=config.vocabulary,
        coverage=coverage,
    )
    line = (
        f"heads.vocabulary {config.vocabulary} of {config.vocab_size} tokens holds {coverage:.2%} of the labels and is "
        f"expected to make decoding {gain:.3f} times as fast"
    )
    if gain < 1 and not force:
        raise RequestError(f"{line}; leave it out, take more tokens, or insist with heads.force_vocabulary=true")
    return line
