"""Which heads to train when nobody says: those expected to decode fastest, not those that guess best (docs/heads.md).

Expected speed is tau x T(1) / (T(n) + T(heads)). Decoding one text reads weights, so times are counted in weights read:

    T(n) + T(heads)  =  TREE (backbone + OVERHEAD)  +  heads  +  LM head once more, if it is shared
    tau              =  proportional to 1 - LOSS / sqrt(inner width of a head)

The constants were measured on two backbones (H = 64 and 256) and are extrapolated beyond them; what yours gain,
`medusa benchmark` tells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from medusa.config import GATED
from train.config import NUM_HEADS, HeadsConfig

TREE = 1.6  # T(n) / T(1) for the tree sizes that pay: eight nodes on a CPU, some dozens on a GPU
OVERHEAD = 5e6  # what a forward costs before it reads a weight (1.3 ms on a CPU for 6 layers), in weights
LOSS = 2.4  # fitted to tau at inner widths of 256 and 512 with H = 64; less is lost at H = 256
OWN_GAIN = 1.03  # tau of MLP heads with LM heads of their own over the shared one
CHAIN = 0.75  # how often a guess is right where all before it were, for what a reduced vocabulary costs: tau 3.1 of 5
NEARLY = 0.995  # narrower heads train faster and take less memory: they win near-ties
WIDTHS = [2**power for power in range(5, 16)]


def learning_rate(hidden_size: int) -> float:
    """The peak learning rate where none is given: 5e-3 at H = 64 and 3e-3 at 256 did best; by that law 1e-3 at 4096."""
    return 5e-3 * (64 / hidden_size) ** 0.37


@dataclass(frozen=True)
class Candidate:
    """MLP heads of one total width."""

    inner: int
    """Width of all blocks of a head together."""
    own_lm_head: bool
    speed: float
    """Expected, relative."""


def choose(hidden_size: int, vocab_size: int, backbone_parameters: int, asked: HeadsConfig) -> dict[str, Any]:
    """`block`, `num_layers`, `expansion` and `lm_head` for a backbone of these sizes; what was asked for stands."""
    if asked.block == "square":  # the paper's heads: one block, own LM heads
        layers, lm_head = asked.layers or 1, asked.lm_head or "own"
        return {"block": "square", "num_layers": layers, "expansion": 1.0, "lm_head": lm_head}
    best = fastest(hidden_size, vocab_size, backbone_parameters, asked.num or NUM_HEADS)
    if asked.block == GATED:  # three matrices in the place of two; servers lend it the backbone's LM head
        inner = max(64, round(best.inner / 96) * 64)  # whole tiles, also where a server splits them over GPUs
        expansion = asked.expansion or inner / hidden_size
        lm_head = asked.lm_head or "shared"
        return {"block": GATED, "num_layers": 1, "expansion": expansion, "lm_head": lm_head}
    # Two blocks guess a little better than one of twice the width, as long as neither is narrower than the state.
    layers = asked.layers or (2 if best.inner >= 2 * hidden_size else 1)
    expansion = asked.expansion or best.inner / layers / hidden_size
    lm_head = asked.lm_head or ("own" if best.own_lm_head else "shared")
    return {"block": "mlp", "num_layers": layers, "expansion": expansion, "lm_head": lm_head}


def fastest(hidden_size: int, vocab_size: int, backbone_parameters: int, num_heads: int) -> Candidate:
    """The MLP heads of the highest expected speed; among near-equals the narrowest."""
    candidates = [
        Candidate(inner, own, expected_speed(hidden_size, vocab_size, backbone_parameters, num_heads, inner, own))
        for inner in WIDTHS
        for own in (False, True)
    ]
    top = max(candidate.speed for candidate in candidates)
    return min((c for c in candidates if c.speed >= NEARLY * top), key=lambda c: (c.inner, c.own_lm_head))


def expected_speed(
    hidden_size: int, vocab_size: int, backbone_parameters: int, num_heads: int, inner: int, own: bool
) -> float:
    """tau / (T(n) + T(heads)), up to a constant."""
    lm_heads = (num_heads if own else 1) * hidden_size * vocab_size
    heads = num_heads * 2 * inner * hidden_size + lm_heads
    tau = (1 - LOSS / inner**0.5) * (OWN_GAIN if own else 1.0)
    return tau / (TREE * (backbone_parameters + OVERHEAD) + heads)


def vocabulary_gain(
    *,
    hidden_size: int,
    vocab_size: int,
    backbone_parameters: int,
    num_heads: int,
    blocks: int,
    lm_heads: int,
    vocabulary: int,
    coverage: float,
) -> float:
    """Expected speed of heads that guess among `vocabulary` tokens, over that of the same heads with all of them.

        tau   =  1 + (c q) + (c q)^2 + ... + (c q)^K      q = CHAIN, c = 1 with all tokens
        time  =  TREE (backbone + OVERHEAD) + blocks + lm_heads x vocabulary x H

    Args:
        blocks: parameters of the heads without their LM heads.
        lm_heads: how many LM heads a step reads: K where heads have their own or work one after the other.
        coverage: c, the share of the labels that the tokens hold.
    """

    def speed(words: int, known: float) -> float:
        tau = sum((known * CHAIN) ** depth for depth in range(num_heads + 1))
        weights = TREE * (backbone_parameters + OVERHEAD) + blocks + lm_heads * hidden_size * words
        return tau / weights

    return speed(vocabulary, coverage) / speed(vocab_size, 1.0)
