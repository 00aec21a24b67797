"""How much an error of a head counts: objectives for sampling, and the loss weights of heads and positions.

Objectives for sampling are losses that fall with the probability that a head's guess is accepted.

At a position, a head gives token x the probability q(x), and the backbone, whose token is drawn, gives it p(x).

    objective    accepted with the probability a            the loss
    tv           a = sum_x min(p(x), q(x)): a drawn draft   0.1 C + 0.9 (1 - a), C the cross-entropy (DeepSpec)
    lk           the same                                   -log a (LK losses, arXiv 2602.23881)
    lk-hybrid    the same                                   s C + (1 - s) (1 - a), s = exp(-3 a) held fixed (the same)
    mass         a = sum_x p(x) (1 - (1 - q(x))^c)          -log a

The a of drawn drafts is that of rejection sampling (Leviathan et al. 2023), and 1 minus the total variation distance.
With chosen drafts, a is the mass of p on the children, the head's c best tokens. That has no gradient, so `mass` uses
the probability that a draw from p is among c draws from q instead: it rises most where q decides which tokens are
among the c best. If p has one token only, lk, and mass with c = 1, are the cross-entropy.

Shapes: K heads, C positions, ... any positions, V vocabulary. If heads guess among a part of the backbone's tokens, V
is the size of the part, and p adds up to less than 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ACCEPTANCE_OBJECTIVES = ("tv", "lk", "lk-hybrid", "mass")
CROSS_ENTROPY_SHARE = 0.1  # of tv: alone, 1 - a has almost no gradient while heads are untrained
ETA = 3.0  # of lk-hybrid, the paper's value
LEAST = 1e-30  # smallest probability whose logarithm is taken
WEIGHTINGS = ("decay", "dpace")
DECAY = 0.8  # the paper's value


@dataclass(frozen=True)
class Acceptance:
    """One of `ACCEPTANCE_OBJECTIVES`; `children` is the c of mass."""

    objective: str
    children: int = 4

    def probability(self, p: Tensor, q: Tensor) -> Tensor:
        """The probability of acceptance [...] for targets p and guesses q [..., V]."""
        if self.objective == "mass":
            # The geometric series (1 - (1 - q)^c) / q, because the power alone would round small q away.
            among = torch.ones_like(q)
            for _ in range(self.children - 1):
                among = 1 + among * (1 - q)
            return (p * q * among).sum(-1)
        return torch.minimum(p, q).sum(-1)

    def slope(self, p: Tensor, q: Tensor) -> Tensor:
        """The derivative [..., V] of the probability of acceptance with respect to q."""
        if self.objective == "mass":
            return (1 - q).pow_(self.children - 1).mul_(p).mul_(self.children)
        return (q < p).to(q.dtype)

    def loss(self, accepted: Tensor, cross_entropy: Tensor) -> Tensor:
        """The loss [...] from the probability of acceptance and the cross-entropy [...]."""
        share = self.cross_entropy_share(accepted)
        if share is None:
            return -accepted.clamp_min(LEAST).log()
        return share * cross_entropy + (1 - share) * (1 - accepted)

    def cross_entropy_share(self, accepted: Tensor) -> Tensor | None:
        """The share [...] of the cross-entropy in the loss; `None` if the loss is -log a."""
        if self.objective == "tv":
            return torch.full_like(accepted, CROSS_ENTROPY_SHARE)
        return (-ETA * accepted.detach()).exp() if self.objective == "lk-hybrid" else None

    def gradient_(self, q: Tensor, p: Tensor, accepted: Tensor) -> None:
        """Replace q [..., V], the softmax of logits, by the gradient of the loss by these logits.

        p [..., V] are the targets, and `accepted` [...] is the probability of acceptance."""
        share = self.cross_entropy_share(accepted)
        by_accepted = accepted.clamp_min(LEAST).reciprocal() if share is None else 1 - share
        slope = self.slope(p, q)
        slope -= torch.linalg.vecdot(q, slope)[..., None]
        slope *= -by_accepted[..., None]
        if share is None:
            q *= slope
            return
        slope += (share * p.sum(-1))[..., None]
        q.mul_(slope).addcmul_(p, share[..., None], value=-1)


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
