"""Recurrent heads: head k takes head k - 1's output vector and the embedding of the token guessed there.

Between the cascade, whose vector does not know which guess was taken, and Hydra, whose heads all start afresh from the
hidden state. Inputs stay 2 H wide however deep the tree is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import StackedHeads, State, normalised


class RecurrentHeads(StackedHeads):
    """The state is the output vector [..., H]."""

    follows_path = True

    def input_size(self, head: int) -> int:
        return 2 * self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        (above,) = state
        feature = self.stacks[head](above, torch.cat([above, normalised(token)], dim=-1))
        return feature, (feature,)
