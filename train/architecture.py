"""Which heads to train where a recipe does not say: those expected to decode fastest, not those that guess best.

Expected speed is tau x T(1) / (T(n) + T(heads)) (docs/heads.md). Decoding one text is bound by reading weights, so
times are counted in weights that are read:

    T(n) + T(heads)  =  TREE (backbone + OVERHEAD)  +  heads  +  LM head once more, if it is shared
    tau              =  proportional to 1 - LOSS / sqrt(inner width of a head)

The constants were measured on two backbones (H = 64 and 256) and are extrapolated beyond them; `medusa benchmark`
measures what heads gain on yours.
"""

from __future__ import annotations

from typing import NamedTuple

from medusa.config import GATED
from train.config import NUM_HEADS, HeadsConfig

TREE = 1.6  # T(n) / T(1) for the tree sizes that pay: eight nodes on a CPU, some dozens on a GPU
OVERHEAD = 5e6  # cost of a forward before it reads a weight (1.3 ms on a CPU for 6 layers), in weights
LOSS = 2.4  # fitted to tau at inner widths of 256 and 512 with H = 64; less is lost at H = 256
OWN_GAIN = 1.03  # tau of MLP heads with LM heads of their own, over that with the shared one
CHAIN = 0.75  # how often a guess is right where all before it were, for the cost of a reduced vocabulary: tau 3.1 of 5
NEARLY = 0.995  # near-ties go to narrower heads, which train faster and take less memory
WIDTHS = [2**power for power in range(5, 16)]


class BackboneSizes(NamedTuple):
    """The sizes of a backbone that the choice depends on."""

    hidden_size: int
    vocab_size: int
    parameters: int


class HeadShape(NamedTuple):
    """The blocks and LM heads of heads, by the names of `MedusaConfig`."""

    block: str
    num_layers: int
    expansion: float
    lm_head: str


def learning_rate(hidden_size: int) -> float:
    """The peak learning rate where none is given: 5e-3 at H = 64 and 3e-3 at 256 did best; by that law 1e-3 at 4096."""
    return 5e-3 * (64 / hidden_size) ** 0.37


def choose(sizes: BackboneSizes, asked: HeadsConfig) -> HeadShape:
    """The shape of heads for a backbone of these sizes; what was asked for is kept."""
    if asked.block == "square":  # the paper's heads: one block, own LM heads
        return HeadShape("square", asked.layers or 1, 1.0, asked.lm_head or "own")
    inner, own = fastest(sizes, asked.num or NUM_HEADS)
    if asked.block == GATED:  # three matrices instead of two; servers give it the backbone's LM head
        inner = max(64, round(inner / 96) * 64)  # whole tiles, also where a server splits them over GPUs
        return HeadShape(GATED, 1, asked.expansion or inner / sizes.hidden_size, asked.lm_head or "shared")
    # Two blocks guess a little better than one of twice the width, if neither is narrower than the hidden state.
    layers = asked.layers or (2 if inner >= 2 * sizes.hidden_size else 1)
    expansion = asked.expansion or inner / layers / sizes.hidden_size
    return HeadShape("mlp", layers, expansion, asked.lm_head or ("own" if own else "shared"))


def fastest(sizes: BackboneSizes, num_heads: int) -> tuple[int, bool]:
    """Total inner width of the MLP heads of the highest expected speed, and whether their LM heads are their own.

    Among near-equals these are the narrowest heads.
    """
    kinds = [(inner, own) for inner in WIDTHS for own in (False, True)]
    speeds = {kind: expected_speed(sizes, num_heads, *kind) for kind in kinds}
    return min(kind for kind, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))


def expected_speed(sizes: BackboneSizes, num_heads: int, inner: int, own: bool) -> float:
    """tau / (T(n) + T(heads)), up to a constant."""
    lm_heads = (num_heads if own else 1) * sizes.hidden_size * sizes.vocab_size
    heads = num_heads * 2 * inner * sizes.hidden_size + lm_heads
    tau = (1 - LOSS / inner**0.5) * (OWN_GAIN if own else 1.0)
    return tau / (TREE * (sizes.parameters + OVERHEAD) + heads)


def vocabulary_gain(
    sizes: BackboneSizes, *, num_heads: int, blocks: int, lm_heads: int, vocabulary: int, coverage: float
) -> float:
    """Expected speed of heads that guess among `vocabulary` tokens, over that of the same heads with all tokens.

        tau   =  1 + (c q) + (c q)^2 + ... + (c q)^K      q = CHAIN, c = 1 with all tokens
        time  =  TREE (backbone + OVERHEAD) + blocks + lm_heads x vocabulary x H

    Args:
        blocks: parameters of the heads without their LM heads.
        lm_heads: how many LM heads a step reads: K where heads have their own or work one after the other.
        coverage: c, the share of the labels that are in the vocabulary.
    """

    def speed(tokens: int, known: float) -> float:
        tau = sum((known * CHAIN) ** depth for depth in range(num_heads + 1))
        weights = TREE * (sizes.parameters + OVERHEAD) + blocks + lm_heads * sizes.hidden_size * tokens
        return tau / weights

    return speed(vocabulary, coverage) / speed(sizes.vocab_size, 1.0)
