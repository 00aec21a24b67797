"""The tokens of a reduced vocabulary of heads (`medusa.vocabulary`): the training text's most frequent.

The cost is known before training: a label outside the vocabulary is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from train.architecture import BackboneSizes, vocabulary_gain
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.files import PER_TOKEN, Features
from train.loss.targets import IGNORE, head_labels

ROWS = 1024  # counted at a time


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
