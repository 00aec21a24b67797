"""The loss weights of heads: how much the error of each head counts at each position.

Shapes: K heads, C positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHTINGS = ("decay", "dpace")
DECAY = 0.8  # the paper's value


@dataclass(frozen=True)
class Weighting:
    """A rule for the loss weights of K heads at C positions: decay or dpace.

    decay: head k has the weight decay^k everywhere, because its guess matters only where the guesses of all earlier
    heads are right (paper, section 2.2.1).

    dpace: the weight is the effect of a head on the expected number of accepted guesses at this position (D-PACE,
    arXiv 2605.18810). If head i is right with probability q_i, the expected number is E = sum_m q_0 q_1 ... q_m, and

        dE / d log q_j  =  sum_{m >= j} q_0 q_1 ... q_m  =:  w_j

    The loss -sum_j w_j log q_j, with constant weights w_j, therefore has the gradient of -E. q_i is the probability
    that head i gives to its label, and 0 where it has no label. Untrained heads would get almost no weight, so
    (1 - smoothing) q_i + smoothing is used instead of q_i."""

    kind: str = "decay"
    decay: float = DECAY
    smoothing: float = 0.5

    def __call__(self, probability: Tensor, labelled: Tensor) -> Tensor:
        """Compute the loss weights [K, C] of K heads at C positions from the probabilities [K, C] of their labels.

        `labelled` [K, C] is True where a head has a label; elsewhere the weight is 0."""
        if self.kind == "decay":
            return head_weights(len(labelled), self.decay).to(probability.device)[:, None] * labelled
        lifted = ((1 - self.smoothing) * probability.detach() + self.smoothing) * labelled
        gains = lifted.cumprod(0)  # probability that heads 0 to i are all right
        return gains.flip(0).cumsum(0).flip(0) * labelled


def head_weights(num_heads: int, decay: float) -> Tensor:
    """The loss weights [K] of K = `num_heads` heads: decay^k for head k, counted from 0."""
    return decay ** torch.arange(num_heads, dtype=torch.float32)


PAPERS_WEIGHTING = Weighting()
