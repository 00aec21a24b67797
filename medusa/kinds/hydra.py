"""Sequential heads: head k sees the hidden state and the tokens guessed before it (Hydra, arXiv 2402.05109).

    z_k = [h ; e(root) ; e(guess 1) ; ... ; e(guess k)]        head 0 sees h and the root

So what stands under a node depends on the node, and its siblings have other children.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.steps import StepHeads, normalised


class HydraHeads(StepHeads):
    """The state is all that was seen so far [..., (k + 1) H]."""

    follows_path = True

    def input_size(self, head: int) -> int:
        return (head + 2) * self.config.hidden_size

    def step(self, head: int, state: Tensor, token: Tensor | None) -> tuple[Tensor, Tensor]:
        assert token is not None
        state = torch.cat([state, normalised(token)], dim=-1)
        return self.stacks[head](state[..., : self.config.hidden_size], state), state
