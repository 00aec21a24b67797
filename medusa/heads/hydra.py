"""Sequential heads: head k sees the hidden state and the tokens guessed before it (Hydra, arXiv 2402.05109).

    z_k = [h ; e(root) ; e(guess 1) ; ... ; e(guess k)]        head 0 sees h and the root

So the children of a node depend on the node, and its siblings have other children.

Ours add a block of z_k to h, and scale embeddings to the hidden state. The original's (block `hydra`, read by
`medusa.checkpoints.hydra`) add it to a learned matrix times z_k instead of h, take embeddings as they are, and have LM
heads with a bias.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import ORIGINAL_HYDRA, MedusaConfig
from medusa.heads.context_kv import ContextKV
from medusa.heads.independent import LMHead
from medusa.heads.sequential import StackedHeads, State, normalised


class OriginalBlock(nn.Module):
    """z R + c + SiLU(z W + b); z + SiLU(z W + b) if z already has the hidden state's size."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, hidden_size)
        self.res_connection = nn.Identity() if input_size == hidden_size else nn.Linear(input_size, hidden_size)

    def forward(self, z: Tensor) -> Tensor:
        return self.res_connection(z) + F.silu(self.linear(z))


class OriginalStack(nn.Module):
    """The blocks of one head in a row. The hidden state is a part of z, so x is not read."""

    def __init__(self, config: MedusaConfig, input_size: int) -> None:
        super().__init__()
        sizes = [input_size] + [config.hidden_size] * (config.num_layers - 1)
        self.layers = nn.ModuleList(OriginalBlock(size, config.hidden_size) for size in sizes)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        del x
        for layer in self.layers:
            z = layer(z)
        return z


class HydraHeads(StackedHeads):
    """Hydra heads. The state is z of the head before [..., (k + 1) H]."""

    follows_path = True

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        self.lm_biases: nn.Parameter | None = None
        if config.block == ORIGINAL_HYDRA and config.vocab_size is not None:
            tokens = config.draft_vocab_size(config.vocab_size)
            self.lm_biases = nn.Parameter(torch.zeros(config.num_heads, tokens))

    def make_blocks(self) -> None:
        if self.config.block != ORIGINAL_HYDRA:
            return super().make_blocks()
        sizes = [self.input_size(head) for head in range(self.config.num_heads)]
        self.stacks = nn.ModuleList(OriginalStack(self.config, size) for size in sizes)

    def input_size(self, head: int) -> int:
        return (head + 2) * self.config.hidden_size

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        seen = torch.cat([*state, normalised(token) if self.lm_biases is None else token], dim=-1)
        return self.stacks[head](seen[..., : self.config.hidden_size], seen), (seen,)

    def logits(self, features: Tensor, lm_head: LMHead | None = None) -> Tensor:
        logits = super().logits(features, lm_head)
        if self.lm_biases is None:
            return logits
        biases = self.lm_biases[: len(features)]
        return logits + biases.view(len(biases), *[1] * (logits.ndim - 2), -1)

    def logits_of(self, head: int, features: Tensor, lm_head: LMHead) -> Tensor:
        logits = super().logits_of(head, features, lm_head)
        return logits if self.lm_biases is None else logits + self.lm_biases[head]
