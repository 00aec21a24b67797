"""Which tokens heads with a vocabulary of their own guess (`medusa.vocabulary`): the training text's most frequent.

What that costs is known before training: a label that the list does not hold is a guess that can never be right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from train.architecture import vocabulary_gain
from train.data import PackedDataset, StreamedDataset
from train.features import Features
from train.labels import IGNORE, head_labels

ROWS = 1024  # counted at a time


class Chosen(NamedTuple):
    """A vocabulary, and how much of the text it holds."""

    ids: Tensor
    """[N] tokens, the most frequent first."""
    coverage: float
    """Share of the labels of one half of the text that the most frequent tokens of the other half hold."""


def most_frequent(dataset: PackedDataset | StreamedDataset | Features, size: int, vocab_size: int) -> Chosen:
    """The `size` most frequent labels of a text; among equals those with the lower ids, which tokenizers learnt first.

    Raises:
        RequestError: a stream, which has no end, or more tokens than there are.
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
        # A row to either half; what is not many rows (features on disk) is cut in two.
        halves = (labels[::2], labels[1::2]) if len(labels) > 1 else labels.flatten().chunk(2)
        for half, part in enumerate(halves):
            counts[(half + number) % 2] += torch.bincount(part[part != IGNORE], minlength=vocab_size)
    found = sum(int(counts[1 - half, ids].sum()) for half in range(2) for ids in [_most_frequent(counts[half], size)])
    return Chosen(_most_frequent(counts.sum(0), size), found / max(int(counts.sum()), 1))


def _most_frequent(counts: Tensor, size: int) -> Tensor:
    return counts.sort(descending=True, stable=True).indices[:size]


def _labels(dataset: PackedDataset | Features) -> Iterator[Tensor]:
    """Labels of the first head, in pieces [B, T]; the others have the same but for a document's first tokens."""
    names = ("input_ids", "loss_mask", "document_ids")
    if isinstance(dataset, PackedDataset):
        whole = [getattr(dataset, name) for name in names]
        pieces = [[column[start : start + ROWS] for column in whole] for start in range(0, len(dataset), ROWS)]
    else:
        pieces = [[shard[name][None] for name in names] for shard in dataset.tokens]
    for ids, mask, documents in pieces:
        yield head_labels(ids.long(), mask, documents.long(), 1)[0]


def require_worthwhile(heads: MedusaHeads, backbone: nn.Module, coverage: float, insist: bool) -> str:
    """A line about what the heads' vocabulary wins.

    Raises:
        RequestError: it is expected to lose, and nobody insists.
    """
    config = heads.config
    assert config.vocabulary is not None
    assert config.vocab_size is not None
    of_lm_heads = 0 if heads.lm_heads is None else heads.lm_heads.numel()
    gain = vocabulary_gain(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        backbone_parameters=sum(parameter.numel() for parameter in backbone.parameters()),
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
    if gain < 1 and not insist:
        raise RequestError(f"{line}; leave it out, take more tokens, or insist with heads.force_vocabulary=true")
    return line
