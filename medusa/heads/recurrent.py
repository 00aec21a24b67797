"""Recurrent heads: head k reads the output vector of head k - 1 and the embedding of the token guessed there.

They lie between the cascade, whose vector is the same for all guesses, and Hydra, whose heads all start from the hidden
state. Inputs stay 2 H wide at every depth of the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import StackedHeads, State, normalised


class RecurrentHeads(StackedHeads):
    """Recurrent heads. The state is the output vector [..., H]."""

    follows_path = True

    def input_size(self, head: int) -> int:
        return 2 * self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        (above,) = state
        feature = self.stacks[head](above, torch.cat([above, normalised(token)], dim=-1))
        return feature, (feature,)
