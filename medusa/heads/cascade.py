"""Cascaded heads: head k reads the output vector of head k - 1.

A guess depends on the computation of the guesses before it, not on which of them was chosen. So the tree stays a
product of every head's best guesses, and a step costs as much as with independent heads.
"""

from __future__ import annotations

from torch import Tensor

from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import StackedHeads, State


class CascadeHeads(StackedHeads):
    """Cascaded heads. The state is the output vector [..., H]."""

    def input_size(self, head: int) -> int:
        return self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        (above,) = state
        feature = self.stacks[head](above, above)
        return feature, (feature,)
