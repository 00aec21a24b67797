"""Cascaded heads: head k takes head k - 1's output vector as its input.

A guess depends on how the guesses before it were arrived at, not on which of them was taken: the tree stays a product
of every head's best guesses, and a step costs what it costs with independent heads.
"""

from __future__ import annotations

from torch import Tensor

from medusa.heads.context_kv import ContextKV
from medusa.heads.sequential import StackedHeads, State


class CascadeHeads(StackedHeads):
    """The state is the output vector [..., H]."""

    def input_size(self, head: int) -> int:
        return self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        (above,) = state
        feature = self.stacks[head](above, above)
        return feature, (feature,)
