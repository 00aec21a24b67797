"""Sequential heads: head k starts from the state that head k - 1 left, and from the token before its own on the path.

That token is the root for head 0 and the first guess for head 1. In training it is the text's; in decoding it is a
node's, so that heads run level by level of the tree. A kind may also attend to the text (`uses_context`): to pairs of a
hidden state and the token after it, at all positions before the one that head 0 starts from.

Shapes: ... any positions or nodes, K heads, H hidden size, S size of a part of a state, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.errors import RequestError
from medusa.heads.blocks import Stack
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import LMHead, MedusaHeads
from medusa.heads.inputs import HeadInputs

State = tuple[Tensor, ...]
"""What a head leaves to the next one: tensors [..., S], which all children of a node share."""


class SequentialHeads(MedusaHeads, ABC):
    """K heads in a row. A kind defines its modules (`make_blocks`) and the computation of one head (`step`)."""

    @abstractmethod
    def make_blocks(self) -> None: ...

    def begin(self, hidden: Tensor) -> State:
        """hidden [..., H] of the backbone -> the state that head 0 starts from."""
        return (hidden,)

    @abstractmethod
    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """Run one head.

        Args:
            head: its number, from 0.
            state: the state that the head before left.
            token: [..., H] embedding of the token before the guessed one, for kinds that follow the path.
            context_kv: keys and values of the text before, for kinds that look back; `None`: there is none.

        Returns:
            The output [..., H], to which the LM head is applied, and the state that the next head starts from.
        """

    def features(self, inputs: HeadInputs, num_heads: int | None = None) -> Tensor:
        hidden, following, context_kv = inputs
        if self.follows_path and following is None:
            raise RequestError(f"heads of kind {self.config.kind} guess from the tokens before; pass `following`")
        state, found = self.begin(hidden), []
        for head in range(self.config.num_heads if num_heads is None else num_heads):
            token = None if following is None else following[..., head, :]
            feature, state = self.step(head, state, token, context_kv)
            found.append(feature)
        return torch.stack(found)

    def logits_of(self, head: int, features: Tensor, lm_head: LMHead) -> Tensor:
        """features [..., H] of one head -> its logits [..., V]."""
        return lm_head(features) if self.lm_heads is None else features @ self.lm_heads[head]


class StackedHeads(SequentialHeads):
    """Sequential heads with a stack of blocks each; a kind defines the size of their inputs."""

    def make_blocks(self) -> None:
        self.stacks = nn.ModuleList(Stack(self.config, self.input_size(head)) for head in range(self.config.num_heads))

    @abstractmethod
    def input_size(self, head: int) -> int:
        """The size of a head's input to its first block."""


def normalised(token: Tensor) -> Tensor:
    """An embedding [..., H] at the scale of a hidden state: root mean square 1, whatever the backbone's scale."""
    return F.rms_norm(token, token.shape[-1:])
