"""The default shape of heads, expected to decode fastest, and the tokens of a reduced vocabulary.

The expected speedup is tau x T(1) / (T(n) + T(heads)), where tau is the number of tokens per step (docs/heads.md).
Decoding one text is limited by reading weights, so times are counted in weights that are read:

    T(n) + T(heads)  =  TREE (backbone + OVERHEAD)  +  heads  +  LM head once more, if it is shared
    tau              =  proportional to 1 - LOSS / sqrt(inner width of a head)

The constants were measured on two backbones (hidden sizes H = 64 and 256) and are extrapolated to others; `medusa
benchmark` measures the speedup on your backbone.

Heads with a reduced vocabulary (`medusa.vocabulary`) guess among the training text's most frequent tokens. The cost is
known before training: a label outside the vocabulary is never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from medusa.config import GATED
from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from train.data.datasets import PackedDataset, StreamedDataset
from train.features.files import PER_TOKEN, Features
from train.loss.targets import IGNORE, head_labels
from train.recipe import NUM_HEADS, HeadsConfig

TREE = 1.6  # T(n) / T(1) for useful tree sizes: eight nodes on a CPU, some dozens on a GPU
OVERHEAD = 5e6  # fixed cost of a forward, in weights (1.3 ms on a CPU for 6 layers)
LOSS = 2.4  # fitted to tau at inner widths of 256 and 512 with H = 64; less is lost at H = 256
OWN_GAIN = 1.03  # tau of MLP heads with LM heads of their own, over that with the shared one
CHAIN = 0.75  # how often a guess is right after right ones, for the cost of a reduced vocabulary: tau 3.1 of 5
NEARLY = 0.995  # narrower heads within 0.5 % of the fastest win: they train faster and take less memory
ROWS = 1024  # rows whose labels are counted at a time
WIDTHS = [2**power for power in range(5, 16)]


class BackboneSizes(NamedTuple):
    """The sizes of a backbone that determine the default shape of heads."""

    hidden_size: int
    vocab_size: int
    parameters: int


class HeadShape(NamedTuple):
    """The shape of heads: their blocks and LM heads, named as in `MedusaConfig`."""

    block: str
    num_layers: int
    expansion: float
    lm_head: str


def learning_rate(hidden_size: int) -> float:
    """The default peak learning rate: 5e-3 at H = 64 and 3e-3 at 256 did best; the same law gives 1e-3 at 4096."""
    return 5e-3 * (64 / hidden_size) ** 0.37


def choose(sizes: BackboneSizes, asked: HeadsConfig) -> HeadShape:
    """Choose the shape of heads for a backbone of these sizes; keys that `asked` sets are kept."""
    if asked.block == "square":  # the paper's heads: one block, own LM heads
        return HeadShape("square", asked.layers or 1, 1.0, asked.lm_head or "own")
    inner, own = fastest(sizes, asked.num or NUM_HEADS)
    if asked.block == GATED:  # three matrices instead of two; servers give it the backbone's LM head
        inner = max(64, round(inner / 96) * 64)  # whole tiles, also after a server splits them over GPUs
        return HeadShape(GATED, 1, asked.expansion or inner / sizes.hidden_size, asked.lm_head or "shared")
    # Two blocks guess a little better than one of twice the width, if neither is narrower than the hidden state.
    layers = asked.layers or (2 if inner >= 2 * sizes.hidden_size else 1)
    expansion = asked.expansion or inner / layers / sizes.hidden_size
    return HeadShape("mlp", layers, expansion, asked.lm_head or ("own" if own else "shared"))


def fastest(sizes: BackboneSizes, num_heads: int) -> tuple[int, bool]:
    """Total inner width of the MLP heads with the highest expected speed, and whether they have own LM heads.

    Of nearly equal speeds, the narrowest heads win.
    """
    kinds = [(inner, own) for inner in WIDTHS for own in (False, True)]
    speeds = {kind: expected_speed(sizes, num_heads, *kind) for kind in kinds}
    return min(kind for kind, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))


def expected_speed(sizes: BackboneSizes, num_heads: int, inner: int, own: bool) -> float:
    """Expected decoding speed, tau / (T(n) + T(heads)), up to a constant factor."""
    lm_heads = (num_heads if own else 1) * sizes.hidden_size * sizes.vocab_size
    heads = num_heads * 2 * inner * sizes.hidden_size + lm_heads
    tau = (1 - LOSS / inner**0.5) * (OWN_GAIN if own else 1.0)
    return tau / (TREE * (sizes.parameters + OVERHEAD) + heads)


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
