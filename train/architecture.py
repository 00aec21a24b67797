"""The default shape of heads: the one that is expected to decode fastest.

The expected speedup is tau x T(1) / (T(n) + T(heads)). Here tau is the mean number of tokens per step. T(n) is the time
of a backbone's forward over n tokens, and T(heads) that of the heads (docs/kinds.md). Decoding one text is bound by
reading weights, so times are given as numbers of weights that are read:

    T(n) + T(heads)  =  TREE x (backbone + OVERHEAD)  +  heads  +  their own LM heads, or the shared one a second time
    tau              =  proportional to 1 - LOSS / sqrt(inner width of a head)

TREE is T(n) / T(1), OVERHEAD a forward's fixed cost, and LOSS how strongly tau falls as heads get narrower. Measured on
two backbones (H = 64 and 256), they are extrapolated to others. `medusa benchmark` measures a backbone's speedup."""

from __future__ import annotations

from typing import NamedTuple

from medusa.heads import class_of
from medusa.heads.eagle_layer import GATED
from train.config import NUM_HEADS, HeadsConfig

TREE = 1.6  # T(n) / T(1) at useful tree sizes: eight nodes on a CPU, a few dozen on a GPU
OVERHEAD = 5e6  # fixed cost of a forward, in weights (1.3 ms on a CPU for 6 layers)
LOSS = 2.4  # fitted to tau at inner widths of 256 and 512 with H = 64; narrow heads lose less tau at H = 256
OWN_GAIN = 1.03  # tau of MLP heads with their own LM heads, divided by tau with the shared LM head
NEARLY = 0.995  # narrower heads within 0.5 % of the fastest win: they train faster and take less memory
WIDTHS = [2**power for power in range(5, 16)]


class BackboneSizes(NamedTuple):
    """The sizes of a backbone from which the default shape of its heads is chosen."""

    hidden_size: int
    vocab_size: int
    parameters: int


class HeadShape(NamedTuple):
    """The shape of heads: their blocks and LM heads. The fields are named as in `MedusaConfig`."""

    block: str
    num_layers: int
    expansion: float
    lm_head: str


def learning_rate(hidden_size: int) -> float:
    """The default peak learning rate for training heads on a backbone of hidden size H.

    In experiments, 5e-3 was best at H = 64 and 3e-3 at H = 256. The power law through both gives 1e-3 at H = 4096."""
    return 5e-3 * (64 / hidden_size) ** 0.37


def choose(sizes: BackboneSizes, asked: HeadsConfig) -> HeadShape:
    """Choose the shape of heads for a backbone of these sizes; values set in `asked` (the recipe's heads) are kept."""
    if asked.block == "square":  # the paper's heads: one block, own LM heads
        return HeadShape("square", asked.layers or 1, 1.0, asked.lm_head or "own")
    blocks = class_of(asked.kind or "medusa").block_types
    block = asked.block or ("mlp" if "mlp" in blocks else blocks[0])
    inner, own = fastest(sizes, asked.num or NUM_HEADS)
    if block == GATED:  # three matrices instead of two; servers give it the backbone's LM head
        inner = max(64, round(inner / 96) * 64)  # whole tiles, also after a server splits them over GPUs
        return HeadShape(
            GATED, asked.layers or 1, asked.expansion or inner / sizes.hidden_size, asked.lm_head or "shared"
        )
    # Two blocks guess a little better than one block of twice the width, if neither is narrower than H.
    layers = asked.layers or (2 if inner >= 2 * sizes.hidden_size else 1)
    expansion = asked.expansion or inner / layers / sizes.hidden_size
    return HeadShape(block, layers, expansion, asked.lm_head or ("own" if own else "shared"))


def fastest(sizes: BackboneSizes, num_heads: int) -> tuple[int, bool]:
    """Find the fastest MLP heads: inner width, summed over a head's blocks, and whether each has its own LM head."""
    kinds = [(inner, own) for inner in WIDTHS for own in (False, True)]
    speeds = {kind: expected_speed(sizes, num_heads, *kind) for kind in kinds}
    return min(kind for kind, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))


def expected_speed(sizes: BackboneSizes, num_heads: int, inner: int, own: bool) -> float:
    """The expected decoding speed, up to a constant factor, of MLP heads with `own` or shared LM heads.

    `inner` is the inner width of a head, summed over its blocks."""
    lm_heads = (num_heads if own else 1) * sizes.hidden_size * sizes.vocab_size
    heads = num_heads * 2 * inner * sizes.hidden_size + lm_heads
    tau = (1 - LOSS / inner**0.5) * (OWN_GAIN if own else 1.0)
    return tau / (TREE * (sizes.parameters + OVERHEAD) + heads)
