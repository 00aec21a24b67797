"""The parts of the decoder layers of EAGLE heads: attention with cached keys, and Llama's gated MLP.

Shapes: `...` any positions or nodes, H hidden size of the layer, A attention heads, G heads of keys, D their size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import GATED_EPS, LayerSizes, MedusaConfig
from medusa.heads.context_kv import BASE, KV, ContextKV, apply_rope, attend_to_path, attention_heads


def layer_sizes(config: MedusaConfig) -> LayerSizes:
    """Return the sizes of the layers of `eagle` heads: those of the config, or one layer as wide as the backbone."""
    if config.layer is not None:
        return config.layer
    size = config.hidden_size
    heads = attention_heads(size)
    return LayerSizes(
        hidden_size=size,
        width=config.inner_size,
        layers=1,
        heads=heads,
        key_value_heads=heads,
        head_size=size // heads,
        eps=GATED_EPS,
        rope={"rope_type": "default", "rope_theta": BASE},
        variants=[],
    )


class CachedAttention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) of a query to the text's keys and to those of its path."""

    norm: nn.Module
    stack: nn.Module

    def make_attention(self, sizes: LayerSizes, input_size: int) -> None:
        """Create the matrices; the one of the output starts at zero, so that a new layer is the identity."""
        heads, groups, size = sizes["heads"], sizes["key_value_heads"], sizes["head_size"]
        self.count, self.groups, self.size = heads, groups, size
        self.pair = nn.Linear(input_size, (heads + 2 * groups) * size, bias="attention_bias" in sizes["variants"])
        self.out = nn.Linear(heads * size, sizes["hidden_size"], bias=False)
        nn.init.zeros_(self.out.weight)
        self.query_norm = self.key_norm = None
        if "qk_norm" in sizes["variants"]:
            self.query_norm, self.key_norm = (nn.RMSNorm(size, sizes["eps"]) for _ in range(2))

    def project(self, x: Tensor, angles: KV) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries [..., A, D], keys and values [..., G, D] of inputs x; rotate queries and keys by `angles`.

        The `angles` are cosines and sines [..., D]."""
        mixed = self.pair(x).unflatten(-1, (-1, self.size))
        query, key, value = mixed.split([self.count, self.groups, self.groups], dim=-2)
        both = mixed[..., : -self.groups, :]
        if self.query_norm is not None and self.key_norm is not None:
            both = torch.cat([self.query_norm(query), self.key_norm(key)], dim=-2)
        query, key = _rotated(both, angles).split([self.count, self.groups], dim=-2)
        return query, key, value

    def keys_and_values(self, x: Tensor, angles: KV) -> KV:
        """Compute the keys and values [..., G, D] of inputs x, without queries; `angles`: see `project`."""
        start, bias = self.count * self.size, self.pair.bias
        both = F.linear(x, self.pair.weight[start:], None if bias is None else bias[start:])
        key, value = both.unflatten(-1, (2, self.groups, -1)).unbind(-3)
        return _rotated(key if self.key_norm is None else self.key_norm(key), angles), value

    def attend(self, query: Tensor, own: list[Tensor], context_kv: ContextKV | None, layer: int) -> Tensor:
        """Attend to the text and to the path (`attend_to_path`); return the output [..., A D], before its matrix."""
        return attend_to_path(query, own, self.groups, context_kv, layer).flatten(-2)


def _rotated(x: Tensor, angles: KV) -> Tensor:
    """Rotate queries or keys [..., heads, D] by angles [..., D], which the heads share."""
    return apply_rope(x, (angles[0][..., None, :], angles[1][..., None, :]))


class DeeperLayer(CachedAttention):
    """A Llama layer after the first one of `eagle` heads: it reads only the output of the layer before it."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        sizes = layer_sizes(config)
        self.norm = nn.RMSNorm(sizes["hidden_size"], sizes["eps"])
        self.make_attention(sizes, sizes["hidden_size"])
        self.stack = GatedStack(config)


class GatedStack(nn.Module):
    """Llama's residual MLP: x + W (SiLU(G n) * (U n)), n = norm(x). G, U, W: gate, up, down. W starts at zero."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        sizes = layer_sizes(config)
        size, inner = sizes["hidden_size"], sizes["width"]
        self.norm = nn.RMSNorm(size, sizes["eps"])
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down.weight)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # z has the token, which only EAGLE-3's attention reads
        inner = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(inner)) * self.up(inner)))
