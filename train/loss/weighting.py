"""How much each head's error counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHTINGS = ("decay", "dpace")
DECAY = 0.8  # the paper's


@dataclass(frozen=True)
class Weighting:
    """Weights of K heads at C positions, by one of two rules.

    `decay`: head k counts decay^k, because a far head matters only where all nearer heads were right (paper, section
    2.2.1).

    `dpace`: each position's own share in the expected number of accepted guesses (D-PACE, arXiv 2605.18810). If head i
    is right with probability q_i, a chain gains E = sum_m q_0 q_1 ... q_m tokens, and

        dE / d log q_j  =  sum_{m >= j} q_0 q_1 ... q_m  =:  w_j

    so -sum_j w_j log q_j with w held fixed has the gradient of -E. q_i is the head's probability of its label. With q_i
    alone untrained heads would get no weight, so q_i is first raised to (1 - smoothing) q_i + smoothing. q_i is 0 where
    the text ends before head i's label.
    """

    kind: str = "decay"
    decay: float = DECAY
    smoothing: float = 0.5

    def __call__(self, probability: Tensor, taught: Tensor) -> Tensor:
        """Weights [K, C] without gradient, from the labels' probabilities [K, C] and where there is a label [K, C]."""
        if self.kind == "decay":
            return head_weights(len(taught), self.decay).to(probability.device)[:, None] * taught
        lifted = ((1 - self.smoothing) * probability.detach() + self.smoothing) * taught
        gains = lifted.cumprod(0)  # of each prefix of the chain of heads
        return gains.flip(0).cumsum(0).flip(0) * taught


def head_weights(num_heads: int, decay: float) -> Tensor:
    """Weights decay^k of K heads [K]."""
    return decay ** torch.arange(num_heads, dtype=torch.float32)


PAPERS_WEIGHTING = Weighting()
