"""Residual blocks of heads. Each block that this package trains starts as the identity (Medusa paper, section 2.1).

A block of independent heads contains the weights of all K heads, so that they run as batched matrix products. Heads
that run one after the other have a separate stack of layers for each head.

Shapes: K heads, M positions, `...` any positions, H hidden size, E width of an MLP, I input size of a stack."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import MedusaConfig
from medusa.heads.stacked import product

ORIGINAL_HYDRA = "hydra"  # the block of the original Hydra's heads, which cannot be trained further


class SquareBlock(nn.Module):
    """The residual block of the Medusa paper for each of K heads: x + SiLU(x W + b). W and b start at zero."""

    stacked_weights = ("weight",)

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        heads, size = config.num_heads, config.hidden_size
        self.weight = nn.Parameter(torch.zeros(heads, size, size))  # [K, in, out]
        self.bias = nn.Parameter(torch.zeros(heads, 1, size))
        self.dropout = nn.Dropout(0.0)

    def forward(self, x_KMH: Tensor, heads: slice) -> Tensor:
        return x_KMH + self.dropout(F.silu(product(x_KMH, self.weight, heads, self.bias)))


class MLPBlock(nn.Module):
    """A residual MLP for each of K heads: x + SiLU(x U + b) D + c. D, b and c start at zero, and U at random."""

    stacked_weights = ("up", "down")

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        heads, size, inner = config.num_heads, config.hidden_size, config.inner_size
        self.up = nn.Parameter(torch.empty(heads, size, inner))  # [K, H, E]
        self.up_bias = nn.Parameter(torch.zeros(heads, 1, inner))
        self.down = nn.Parameter(torch.zeros(heads, inner, size))  # [K, E, H]
        self.down_bias = nn.Parameter(torch.zeros(heads, 1, size))
        self.dropout = nn.Dropout(0.0)
        nn.init.uniform_(self.up, -(size**-0.5), size**-0.5)  # the initialisation of nn.Linear

    def forward(self, x_KMH: Tensor, heads: slice) -> Tensor:
        inner = F.silu(product(x_KMH, self.up, heads, self.up_bias))
        return x_KMH + self.dropout(product(inner, self.down, heads, self.down_bias))


class Stack(nn.Module):
    """The residual blocks of one head, for features x [..., H] and an input z [..., I] that includes x.

    The first block computes x + layer(z). Each later block computes y + layer(y) from the previous block's output y."""

    def __init__(self, config: MedusaConfig, input_size: int) -> None:
        super().__init__()
        sizes = [input_size] + [config.hidden_size] * (config.num_layers - 1)
        self.layers = nn.ModuleList(_layer(config, size) for size in sizes)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        for layer in self.layers:
            x = z = x + self.dropout(layer(z))
        return x


def _layer(config: MedusaConfig, input_size: int) -> nn.Module:
    """Create a block of `Stack` without its residual: SiLU(z W + b) for `square`, SiLU(z U + b) D + c for `mlp`.

    Their last matrix and bias (W and b, or D and c) are zero at the start."""
    if config.block == "square":
        last = nn.Linear(input_size, config.hidden_size)
        layer = OrderedDict(linear=last, act=nn.SiLU())
    else:
        up, last = nn.Linear(input_size, config.inner_size), nn.Linear(config.inner_size, config.hidden_size)
        layer = OrderedDict(up=up, act=nn.SiLU(), down=last)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(layer)


class OriginalHydraStack(nn.Module):
    """The blocks of one head of the original Hydra for input z [..., I], which includes the hidden state x."""

    def __init__(self, config: MedusaConfig, input_size: int) -> None:
        super().__init__()
        sizes = [input_size] + [config.hidden_size] * (config.num_layers - 1)
        self.layers = nn.Sequential(*(OriginalHydraBlock(size, config.hidden_size) for size in sizes))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


class OriginalHydraBlock(nn.Module):
    """A block of the original Hydra for input z: z R + c + SiLU(z W + b). If z has size H, the term z R + c is z."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)
        self.res_connection = nn.Identity() if input_size == hidden_size else nn.Linear(input_size, hidden_size)

    def forward(self, z: Tensor) -> Tensor:
        return self.res_connection(z) + F.silu(self.linear(z))
