"""The most frequent tokens of a training text, among which heads with a reduced vocabulary guess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from medusa.errors import RequestError
from train.data.datasets import PackedDataset
from train.data.streaming import StreamedDataset
from train.features.dataset import Features
from train.features.files import PER_TOKEN
from train.loss.labels import IGNORE, head_labels

ROWS = 1024  # rows whose labels are counted at a time


class FrequentTokens(NamedTuple):
    """The most frequent tokens of a training text, and the share of the text that they cover."""

    ids: Tensor
    """Ids [N] of the most frequent tokens, in order of falling frequency."""
    coverage: float
    """Share of the labels that are among the N most frequent tokens. The labels of each half of the text are compared
    with the most frequent tokens of the other half."""


def most_frequent(dataset: PackedDataset | StreamedDataset | Features, size: int, vocab_size: int) -> FrequentTokens:
    """The `size` tokens that are most frequent among the labels of a dataset. Equally frequent tokens are sorted by id.

    Raises:
        RequestError: the dataset is a stream, which has no end; or `size` is not smaller than the vocabulary.
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
        # Rows alternate between the two halves of the text; a single long row (features on disk) is cut in two.
        halves = (labels[::2], labels[1::2]) if len(labels) > 1 else labels.flatten().chunk(2)
        for half, part in enumerate(halves):
            counts[(half + number) % 2] += torch.bincount(part[part != IGNORE], minlength=vocab_size)
    found = sum(int(counts[1 - half, _first(counts[half], size)].sum()) for half in range(2))
    return FrequentTokens(_first(counts.sum(0), size), found / max(int(counts.sum()), 1))


def _first(counts: Tensor, size: int) -> Tensor:
    return counts.sort(descending=True, stable=True).indices[:size]


def _labels(dataset: PackedDataset | Features) -> Iterator[Tensor]:
    """Yield the labels of the first head, [B, T] for B rows of T tokens at a time, to count their frequencies.

    Later heads learn the same tokens, except the first ones of each document, so they are not counted separately.
    """
    if isinstance(dataset, PackedDataset):
        whole = {name: getattr(dataset, name) for name in PER_TOKEN}
        starts = range(0, len(dataset), ROWS)
        pieces = [{name: column[start : start + ROWS] for name, column in whole.items()} for start in starts]
    else:
        pieces = [{name: shard[name][None] for name in PER_TOKEN} for shard in dataset.tokens]
    for piece in pieces:
        yield head_labels(piece["input_ids"].long(), piece["loss_mask"], piece["document_ids"].long(), 1)[0]
