"""The memory that a training run needs, computed from sizes. Nothing is allocated, and nothing here is measured."""

from __future__ import annotations

from typing import NamedTuple

import torch

from medusa.config import MedusaConfig
from medusa.heads.independent import MedusaHeads
from train.loss.chunks import chunk_rows

ADAM_BYTES = 16  # of a trained weight in float32: itself, its gradient and two moments of AdamW
HALF_BYTES = 2  # of the copy of a trained weight in bfloat16, in which the products are computed
BACKBONE_WIDTH = 16  # numbers that the backbone holds at once for a token, as a multiple of the hidden size
HEAD_WIDTH = 6  # the same for each head and token in float32: inputs, products and gradients of a block
RESERVE = 0.9  # share of a card's memory that a run can use; the driver and gaps between tensors take the rest
GIB = 2**30
CARDS = (24, 40, 80)  # GiB


class HeadsSize(NamedTuple):
    """The sizes of a set of heads that decide how much memory its training needs."""

    num_heads: int
    trained: int  # weights, of which `own` are those of own LM heads
    own: int
    vocab_size: int  # number of tokens that the heads guess among


def heads_size(config: MedusaConfig, vocab_size: int) -> HeadsSize:
    """Return the sizes of the heads of a config for a backbone with `vocab_size` tokens, without allocating them."""
    with torch.device("meta"):
        heads = MedusaHeads.from_config(config)
    own = 0 if heads.lm_heads is None else heads.lm_heads.numel()
    trained = sum(parameter.numel() for parameter in heads.parameters())
    return HeadsSize(config.num_heads, trained, own, config.draft_vocab_size(vocab_size))


def training_bytes(heads: HeadsSize, backbone_bytes: int, hidden_size: int, tokens: int, device: str) -> int:
    """Compute the memory in bytes to train heads by AdamW on batches of `tokens` tokens on a frozen backbone.

    `device` is "cpu" or "cuda", where products are computed in bfloat16 by default. The sum holds the backbone, the
    heads with gradients and moments, a chunk of logits with their gradient, and what backbone and heads hold for a
    batch. It is for one process: several, or float16, hold the gradient of own LM heads twice when they accumulate."""
    half = HALF_BYTES if device != "cpu" else 0
    weights = (ADAM_BYTES + half) * heads.trained
    if heads.own:
        weights += half * hidden_size * heads.vocab_size  # a chunk's product, before it is added to the gradient
    rows = min(tokens, chunk_rows(heads.num_heads, heads.vocab_size, device, own=heads.own > 0))
    # The logits of all heads in float32, their gradient in the LM head's dtype, and one head's log-probabilities.
    logits = rows * heads.vocab_size * ((4 + (half or 4)) * heads.num_heads + 4)
    held = tokens * hidden_size * (BACKBONE_WIDTH * (half or 4) + HEAD_WIDTH * 4 * heads.num_heads)
    return backbone_bytes + weights + logits + held


def fits(needed: int, card: int) -> bool:
    """Whether a GPU with a memory of `card` GiB holds a run that needs so many bytes."""
    return needed <= RESERVE * card * GIB
