"""Heads that work one after the other: what a kind of them must say, and the blocks they are made of.

Head k (from 0) starts from what head k - 1 left, its state, and from the token before its own on the path: the root for
head 0, the first guess for head 1. In training that token is the text's; in decoding it is a node's, so the heads are
run level by level of the tree. A kind may also look back at the text (`uses_context`): at pairs of a hidden state
and the token behind it, all those before the position that head 0 starts from.

Shapes: ... any number of positions or nodes, K heads, H hidden size, S size of a part of a state, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import LMHead, MedusaHeads
from medusa.heads.inputs import HeadInputs

State = tuple[Tensor, ...]
"""What a head leaves to the next one: tensors [..., S], which the path's children inherit."""


class Stack(nn.Module):
    """Residual blocks of one head: the first one reads `z` [..., I] and adds to `x` [..., H]; the others read x.

    With their last weights at zero, as at the start, x passes unchanged.
    """

    def __init__(self, config: MedusaConfig, input_size: int) -> None:
        super().__init__()
        sizes = [input_size] + [config.hidden_size] * (config.num_layers - 1)
        block = SquareLayer if config.block == "square" else MLPLayer
        self.layers = nn.ModuleList(block(size, config.hidden_size, config.inner_size) for size in sizes)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        for layer in self.layers:
            x = z = x + self.dropout(layer(z))
        return x


class SquareLayer(nn.Module):
    """SiLU(z W + b), with W = b = 0 at the start (Hydra's, and with I = H the paper's)."""

    def __init__(self, input_size: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        del inner_size
        self.linear = _zeros(nn.Linear(input_size, hidden_size))

    def forward(self, z: Tensor) -> Tensor:
        return F.silu(self.linear(z))


class MLPLayer(nn.Module):
    """SiLU(z U + b) D + c, with D = c = 0 at the start."""

    def __init__(self, input_size: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(input_size, inner_size)
        self.down = _zeros(nn.Linear(inner_size, hidden_size))

    def forward(self, z: Tensor) -> Tensor:
        return self.down(F.silu(self.up(z)))


def _zeros(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class SequentialHeads(MedusaHeads, ABC):
    """K heads in a row. A kind says what it is made of (`make_blocks`) and what a head does (`step`)."""

    @abstractmethod
    def make_blocks(self) -> None: ...

    def begin(self, hidden: Tensor) -> State:
        """hidden [..., H] of the backbone -> the state that head 0 starts from."""
        return (hidden,)

    @abstractmethod
    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        """One head.

        Args:
            state: what the head before left.
            token: [..., H] embedding of the token before the one it guesses, for kinds that follow the path.
            context_kv: of the text before, for kinds that look back; `None`: there is none.

        Returns:
            What the LM head is applied to [..., H], and the state that the next head starts from.
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
    """Heads with a stack of blocks each; a kind says how wide their inputs are."""

    def make_blocks(self) -> None:
        self.stacks = nn.ModuleList(Stack(self.config, self.input_size(head)) for head in range(self.config.num_heads))

    @abstractmethod
    def input_size(self, head: int) -> int:
        """Of what the first block of a head reads."""


def normalised(token: Tensor) -> Tensor:
    """An embedding [..., H] at the scale of a hidden state: root mean square 1, whatever the backbone keeps."""
    return F.rms_norm(token, token.shape[-1:])
