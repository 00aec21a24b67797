"""Residual blocks of heads. All are the identity at the start, so that training begins at the backbone's own guess.

Blocks of independent heads are stacked: all heads cost a few batched matrix products instead of a Python loop. Heads
that run one after the other have a `Stack` of blocks each.

Shapes: K heads, M positions, ... any positions, H hidden size, E width of an MLP, I input size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import MedusaConfig


class SquareBlock(nn.Module):
    """The paper's residual block for each of K heads: x + SiLU(x W + b), with W = b = 0 at first (section 2.1.1)."""

    def __init__(self, num_heads: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        del inner_size  # the square block is as wide as the hidden state
        self.weight = nn.Parameter(torch.zeros(num_heads, hidden_size, hidden_size))  # [K, in, out]
        self.bias = nn.Parameter(torch.zeros(num_heads, 1, hidden_size))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x_KMH: Tensor, heads: slice) -> Tensor:
        return x_KMH + self.dropout(F.silu(torch.baddbmm(self.bias[heads], x_KMH, self.weight[heads])))


class MLPBlock(nn.Module):
    """A residual MLP for each of K heads: x + SiLU(x U + b) D + c. Only D and c start at zero, so all weights learn."""

    def __init__(self, num_heads: int, hidden_size: int, inner_size: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_heads, hidden_size, inner_size))  # [K, H, E]
        self.up_bias = nn.Parameter(torch.zeros(num_heads, 1, inner_size))
        self.down = nn.Parameter(torch.zeros(num_heads, inner_size, hidden_size))  # [K, E, H]
        self.down_bias = nn.Parameter(torch.zeros(num_heads, 1, hidden_size))
        self.dropout = nn.Dropout(0.0)
        nn.init.uniform_(self.up, -(hidden_size**-0.5), hidden_size**-0.5)  # as nn.Linear draws its weights

    def forward(self, x_KMH: Tensor, heads: slice) -> Tensor:
        inner = F.silu(torch.baddbmm(self.up_bias[heads], x_KMH, self.up[heads]))
        return x_KMH + self.dropout(torch.baddbmm(self.down_bias[heads], inner, self.down[heads]))


STACKED_BLOCKS: dict[str, type[SquareBlock] | type[MLPBlock]] = {"square": SquareBlock, "mlp": MLPBlock}


class Stack(nn.Module):
    """The residual blocks of one head. The first reads z [..., I] and adds to x [..., H]; the others read x."""

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
    """SiLU(z W + b), with W = b = 0 at the start (Hydra's block, and for I = H the paper's)."""

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
