"""EAGLE heads (arXiv 2401.15077): one layer, which runs once for each head and then reads its own output.

The layer reads pairs of a feature f and the embedding e of the token after it. For head 0, f is the backbone's hidden
state. For later heads, f is the layer's previous output f''. The LM head reads f''.

    f'  = f + attention([f ; e])      keys and values: the earlier pairs of the text, and those of the path so far
    f'' = f' + blocks([f' ; e])

`blocks` are the blocks of Medusa heads. Embeddings are normalised, and so is f before the attention. A key depends only
on its own pair, so the keys of accepted tokens are cached without running the whole layer. As in EAGLE-3 and HASS,
training runs the layer on its own outputs.

With `block: gated` the layer is that of EAGLE-3 (arXiv 2503.01840), reading the last hidden state. It has norms with
weights, and a Llama's gated MLP (gate G, up U, down W), which does not read the token. The LM head reads norm(f''):

    f' = f + attention([norm(f) ; norm(e)])      f'' = f' + W (SiLU(G norm(f')) * U norm(f'))

Shapes: `...` any positions or nodes, B rows, T tokens, H hidden size, A attention heads, D their size, k a head index.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import GATED, GATED_EPS, MedusaConfig
from medusa.heads.blocks import Stack
from medusa.heads.context_kv import ContextKV, apply_rope, attention_heads, rope_angles
from medusa.heads.sequential import SequentialHeads, State, normalised


class EagleHeads(SequentialHeads):
    """EAGLE heads: one decoder layer that reads pairs of a token and the feature before it.

    The feature of a position is the backbone's hidden state or, in a draft, the layer's output. The state of a draft
    node is its feature [..., H], and the concatenated key and value [..., 2 H] of each pair on the node's path."""

    follows_path = uses_context = True

    def make_blocks(self) -> None:
        size = self.config.hidden_size
        self.count = attention_heads(size)
        self.size = size // self.count
        self.pair = nn.Linear(2 * size, 3 * size, bias=False)  # computes the query, key and value of a pair
        self.out = nn.Linear(size, size, bias=False)
        nn.init.zeros_(self.out.weight)
        self.dropout = nn.Dropout(0.0)
        self.gated = self.config.block == GATED
        self.stack = GatedStack(self.config) if self.gated else Stack(self.config, 2 * size)
        if self.gated:
            self.feature_norm, self.token_norm, self.norm = (nn.RMSNorm(size, GATED_EPS) for _ in range(3))

    def normalised_pair(self, feature: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise the feature [..., H] and the token embedding [..., H] of a pair, as inputs of the attention."""
        if self.gated:
            return self.feature_norm(feature), self.token_norm(token)
        return normalised(feature), normalised(token)

    def project_kv(self, hidden: Tensor, token: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        pair = torch.cat(self.normalised_pair(hidden, token), dim=-1)
        both = F.linear(pair, self.pair.weight[self.config.hidden_size :]).unflatten(-1, (2, self.count, -1))
        keys, values = both.transpose(1, 3).unbind(2)  # [B, A, T, D]
        cos, sin = rope_angles(position_ids, self.size, keys.dtype)
        return apply_rope(keys, (cos[:, None], sin[:, None])), values

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        feature, *path = state
        seen_feature, token = self.normalised_pair(feature, token)
        mixed = self.pair(torch.cat([seen_feature, token], dim=-1)).unflatten(-1, (3, self.count, -1))
        if context_kv is None:
            cos, sin = rope_angles(torch.full((), head, device=mixed.device), self.size, mixed.dtype)
        else:
            cos, sin = (part[..., head, None, None, :] for part in context_kv.angles)
        query, key = apply_rope(mixed[..., :2, :, :], (cos, sin)).unbind(-3)
        path.append(torch.cat([key, mixed[..., 2, :, :]], dim=-1).flatten(-2))
        keys, values = torch.stack(path, dim=-2).unflatten(-1, (self.count, -1)).chunk(2, dim=-1)  # [..., k + 1, A, D]
        scores = (query[..., None, :, :] * keys).sum(-1).transpose(-1, -2)  # [..., A, k + 1]
        if context_kv is None:
            seen, weights = torch.zeros_like(query), (scores * self.size**-0.5).softmax(-1)
        else:
            seen, weights = context_kv.attend(query, scores)
        seen = seen + (weights.transpose(-1, -2)[..., None] * values).sum(-3)
        feature = feature + self.dropout(self.out(seen.flatten(-2)))
        feature = self.stack(feature, torch.cat([feature, token], dim=-1))
        return self.norm(feature) if self.gated else feature, (feature, *path)


class GatedStack(nn.Module):
    """Llama's residual MLP: x + W (SiLU(G n) * (U n)), n = norm(x). G, U, W: gate, up, down. W starts at zero."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.inner_size
        self.norm = nn.RMSNorm(size, GATED_EPS)
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down.weight)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # z has the token, which only EAGLE-3's attention reads
        inner = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(inner)) * self.up(inner)))
