"""The expected speedup of heads with a reduced vocabulary.

Heads with a reduced vocabulary (`medusa.vocabulary`) guess among the most frequent tokens of the training text. They
read fewer LM head weights, but they never guess a label outside the vocabulary. Both effects are estimated before
training. The time of a step is estimated by the number of weights that it reads, as in `train.architecture`.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from medusa.errors import RequestError
from medusa.heads.independent import MedusaHeads
from train.architecture import OVERHEAD, TREE, BackboneSizes

CHAIN = 0.75  # assumed share of right guesses where all earlier guesses are right; gives tau 3.1 with 4 heads


def vocabulary_gain(
    sizes: BackboneSizes, *, num_heads: int, blocks: int, lm_heads: int, vocabulary: int, coverage: float
) -> float:
    """Expected speed of heads with a reduced vocabulary, relative to the same heads with all tokens.

        tau   =  1 + (c q) + (c q)^2 + ... + (c q)^K      q = CHAIN, c = 1 with all tokens
        time  =  TREE (backbone + OVERHEAD) + blocks + lm_heads x vocabulary x H

    K is the number of heads, H the hidden size, and `backbone` the number of the backbone's parameters. q is the share
    of right guesses where all earlier guesses are right. TREE and OVERHEAD are constants (`train.architecture`).

    Args:
        blocks: number of parameters of the heads without their LM heads.
        lm_heads: number of LM heads that a step reads: K if each head has its own, or if heads run one after another.
        vocabulary: number of tokens in the reduced vocabulary.
        coverage: c, the share of the labels that are in the reduced vocabulary.
    """

    def speed(tokens: int, share: float) -> float:
        tau = sum((share * CHAIN) ** depth for depth in range(num_heads + 1))
        weights = TREE * (sizes.parameters + OVERHEAD) + blocks + lm_heads * sizes.hidden_size * tokens
        return tau / weights

    return speed(vocabulary, coverage) / speed(sizes.vocab_size, 1.0)


def require_worthwhile(heads: MedusaHeads, model: PreTrainedModel, coverage: float, force: bool) -> str:
    """Check that a reduced vocabulary is expected to make decoding faster, and describe the expected gain in one line.

    Args:
        coverage: share of the labels that are in the reduced vocabulary.
        force: accept a vocabulary that is expected to slow decoding down.

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
