"""The reduced vocabulary of heads: the most frequent tokens of the training text, and the expected speedup.

Heads with a reduced vocabulary read fewer LM head weights, but never guess other tokens. The time of a step is
estimated by the number of weights that it reads, as in `train.architecture`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads import class_of
from medusa.heads.independent import MedusaHeads
from train.architecture import OVERHEAD, TREE, BackboneSizes
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.files import PER_TOKEN, Features
from train.hardware import heads_size
from train.loss.targets import IGNORE, head_labels

Rows = PackedDataset | StreamedDataset | Features
SMALLEST = 4096  # tokens of a reduced vocabulary that is chosen automatically
LIKELY = 0.98  # coverage of a third of the vocabulary
WORTHWHILE = 1.01  # expected speed of decoding from which a reduced vocabulary is chosen automatically
ROWS = 1024  # rows whose labels are counted at a time
CHAIN = 0.75  # assumed share of right guesses where all earlier guesses are right; gives tau 3.1 with 4 heads


class FrequentTokens(NamedTuple):
    """The N most frequent tokens of a training text."""

    ids: Tensor  # [N] ids of the tokens, in order of falling frequency
    coverage: float  # share of each half's labels that are among the other half's N most frequent tokens, averaged


def most_frequent(dataset: Rows, size: int, vocab_size: int) -> FrequentTokens:
    """The `size` most frequent tokens among the labels of a dataset; equally frequent tokens are sorted by id.

    Raise RequestError if the dataset is a stream, or if `size` is not smaller than the vocabulary."""
    if isinstance(dataset, StreamedDataset):
        raise RequestError("heads.vocabulary is counted on the whole text, and data.streaming has no end; omit one")
    if size >= vocab_size:
        raise RequestError(f"heads.vocabulary is {size}, but the backbone has {vocab_size} tokens; 0 stands for all")
    return _most_frequent(_counts(dataset, vocab_size), size)


def usual_size(config: MedusaConfig, dataset: Rows, parameters: int) -> int | None:
    """Choose the number of tokens that new heads of this `config` guess among; `None`: all.

    It is the power of two, from `SMALLEST` to half the vocabulary, with the largest `vocabulary_gain`, if that is at
    least `WORTHWHILE`. Training gains more, because each label takes a product with the whole LM head. Kinds
    that follow no path keep all tokens, because some programs read such heads with all tokens only (docs/formats.md).
    `parameters` are those of the backbone."""
    full = config.vocab_size
    if full is None or full < 2 * SMALLEST or isinstance(dataset, StreamedDataset) or not _can_have_fewer(config):
        return None
    counts = _counts(dataset, full)
    gains = {
        size: _gain(config, parameters, size, _most_frequent(counts, size).coverage)
        for size in (2**power for power in range(SMALLEST.bit_length() - 1, (full // 2).bit_length()))
    }
    best = max(gains, key=gains.__getitem__)
    return best if gains[best] >= WORTHWHILE else None


def likely_size(config: MedusaConfig, vocab_size: int, parameters: int) -> int:
    """Guess what `usual_size` chooses, before there is a text: a third of the vocabulary, or all of it."""
    fewer = vocab_size // 3
    reduced = fewer >= SMALLEST and _can_have_fewer(config) and _gain(config, parameters, fewer, LIKELY) >= WORTHWHILE
    return fewer if reduced else vocab_size


def _can_have_fewer(config: MedusaConfig) -> bool:
    kind = class_of(config.kind)
    return kind.follows_path and not kind.comes_with_model


def _gain(config: MedusaConfig, parameters: int, vocabulary: int, coverage: float) -> float:
    full = config.vocab_size or vocabulary
    blocks = heads_size(config, full)
    return vocabulary_gain(
        BackboneSizes(config.hidden_size, full, parameters),
        num_heads=config.num_heads,
        blocks=blocks.trained - blocks.own,
        lm_heads=class_of(config.kind).lm_head_reads(config),
        vocabulary=vocabulary,
        coverage=coverage,
    )


def _counts(dataset: PackedDataset | Features, vocab_size: int) -> Tensor:
    """Count each token among the labels of two halves of a dataset [2, V]."""
    counts = torch.zeros(2, vocab_size, dtype=torch.long)
    for number, labels in enumerate(_labels(dataset)):
        # Rows alternate between the two halves of the text; a single long row (features on disk) is cut in two.
        halves = (labels[::2], labels[1::2]) if len(labels) > 1 else labels.flatten().chunk(2)
        for half, part in enumerate(halves):
            counts[(half + number) % 2] += torch.bincount(part[part != IGNORE], minlength=vocab_size)
    return counts


def _most_frequent(counts: Tensor, size: int) -> FrequentTokens:
    found = sum(int(counts[1 - half, _first(counts[half], size)].sum()) for half in range(2))
    return FrequentTokens(_first(counts.sum(0), size), found / max(int(counts.sum()), 1))


def _first(counts: Tensor, size: int) -> Tensor:
    return counts.sort(descending=True, stable=True).indices[:size]


def _labels(dataset: PackedDataset | Features) -> Iterator[Tensor]:
    """Yield the first head's labels [B, T], for B rows of T tokens at a time.

    Later heads learn the same tokens, except the first ones of each document."""
    pieces: Iterable[Sequence[Tensor]]
    if isinstance(dataset, PackedDataset):
        pieces = zip(*(getattr(dataset, name).split(ROWS) for name in PER_TOKEN), strict=True)
    else:
        pieces = ([shard[name][None] for name in PER_TOKEN] for shard in dataset.tokens)
    for ids, documents, mask in pieces:
        yield head_labels(ids.long(), mask, documents.long(), 1)[0]


def vocabulary_gain(
    sizes: BackboneSizes, *, num_heads: int, blocks: int, lm_heads: int, vocabulary: int, coverage: float
) -> float:
    """Expected speed (tau / time) of heads with a reduced vocabulary, divided by that of heads with all tokens.

        tau   =  1 + (c q) + (c q)^2 + ... + (c q)^K      q = CHAIN, c = 1 with all tokens
        time  =  TREE x (backbone + OVERHEAD) + blocks + lm_heads x vocabulary x H

    c is the `coverage`, the share of labels in the reduced vocabulary; K the number of heads; H the hidden size.
    `backbone` and `blocks` count the parameters of the backbone, and of the heads without LM heads. A step reads
    `lm_heads` LM heads: 1 if heads share one and guess in parallel, otherwise K. A forward over a tree takes TREE times
    as long as over one token; OVERHEAD is its fixed cost, in parameters. CHAIN is the accuracy after right guesses."""

    def speed(tokens: int, share: float) -> float:
        tau = sum((share * CHAIN) ** depth for depth in range(num_heads + 1))
        weights = TREE * (sizes.parameters + OVERHEAD) + blocks + lm_heads * sizes.hidden_size * tokens
        return tau / weights

    return speed(vocabulary, coverage) / speed(sizes.vocab_size, 1.0)


def require_worthwhile(heads: MedusaHeads, model: PreTrainedModel, coverage: float, force: bool) -> str:
    """Say what speedup is expected of a reduced vocabulary; unless `force`, raise RequestError if it is below 1."""
    config = heads.config
    assert config.vocabulary is not None
    assert config.vocab_size is not None
    sizes = BackboneSizes(config.hidden_size, config.vocab_size, sum(p.numel() for p in model.parameters()))
    blocks = heads.num_parameters - (0 if heads.lm_heads is None else heads.lm_heads.numel())
    counts = {"num_heads": config.num_heads, "blocks": blocks, "lm_heads": heads.lm_head_reads(config)}
    gain = vocabulary_gain(sizes, **counts, vocabulary=config.vocabulary, coverage=coverage)
    line = (
        f"heads.vocabulary {config.vocabulary} of {config.vocab_size} tokens holds {coverage:.2%} of the labels and is "
        f"expected to make decoding {gain:.3f} times as fast"
    )
    if gain < 1 and not force:
        raise RequestError(f"{line}; leave it out, take more tokens, or insist with heads.force_vocabulary=true")
    return line
