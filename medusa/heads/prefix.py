"""Prefix attention: decoder layers of the heads over the backbone's hidden states (Hydra++, arXiv 2402.05109).

A hidden state was made to predict one token. With attention to all earlier states, heads predict more tokens ahead. The
layers are transformers' Llama layers and the identity at the start. In decoding they keep their own KV cache, which
grows by the accepted tokens only.

Shapes: B rows, T tokens, S slots of the cache, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from medusa.config import MedusaConfig, PrefixSizes
from medusa.heads.context_kv import BASE, attention_heads, rope_angles

EXPANSION = 4
EPS = 1e-6


class Prefix(nn.Module):
    """Map hidden [B, T, H] to hidden [B, T, H], where each position attends to those before it."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        heads = config.prefix["heads"] if config.prefix else attention_heads(size)
        sizes = config.prefix or PrefixSizes(
            heads=heads, key_value_heads=heads, width=EXPANSION * size, eps=EPS, base=BASE, norm=False
        )
        self.config = LlamaConfig(
            hidden_size=size,
            intermediate_size=sizes["width"],
            num_hidden_layers=config.prefix_layers,
            num_attention_heads=heads,
            num_key_value_heads=sizes["key_value_heads"],
            rms_norm_eps=sizes["eps"],
        )
        self.config._attn_implementation = "sdpa"
        self.head_size, self.base = size // heads, sizes["base"]
        self.norm = LlamaRMSNorm(size, sizes["eps"]) if sizes["norm"] else nn.Identity()
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(config.prefix_layers))
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what is added to the residual stream
                nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Run all layers.

        Args:
            hidden: [B, T, H].
            position_ids: [B, T].
            mask: [B, 1, T, S] or broadcast to it: True, or 0, where a token attends.
            cache: holds S - T tokens, to which these are appended; without a cache S is T.
        """
        angles = rope_angles(position_ids, self.head_size, hidden.dtype, self.base)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, past_key_values=cache)
        return self.norm(hidden)
