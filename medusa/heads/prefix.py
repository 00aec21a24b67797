"""Prefix layers: decoder layers between the backbone's hidden states and the heads (Hydra++, arXiv 2402.05109).

A backbone's hidden states are trained to predict only the next token. Prefix layers attend to the states of all
earlier tokens, which helps heads to guess tokens further ahead. The layers are transformers' Llama layers. They start
as the identity. Decoding keeps a KV cache for them, to which it adds only the accepted tokens.

Shapes: B rows, T tokens, S tokens in the cache after a forward, H hidden size."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from medusa.config import MedusaConfig, PrefixSizes
from medusa.heads.context_kv import BASE, Rope, attention_heads


class Prefix(nn.Module):
    """Decoder layers between backbone and heads, and an optional norm; they map hidden states [B, T, H] to new ones."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        heads = config.prefix["heads"] if config.prefix else attention_heads(size)
        sizes = config.prefix or PrefixSizes(
            heads=heads, key_value_heads=heads, width=4 * size, eps=1e-6, base=BASE, norm=False
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
        self.rope = Rope(size // heads, {"rope_theta": sizes["base"]})
        self.norm = LlamaRMSNorm(size, sizes["eps"]) if sizes["norm"] else nn.Identity()
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(config.prefix_layers))
        # These matrices write to the residual stream. With zeros, the layers start as the identity.
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """Run all prefix layers on hidden states [B, T, H] at `position_ids` [B, T]; return the new hidden states.

        The `mask` is broadcast to [B, 1, T, S]. It is True where a token attends, or an additive mask of floats. The
        T tokens are appended to the KV `cache` of S - T earlier tokens. Without a cache, S is T."""
        angles = self.rope.angles(position_ids, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, past_key_values=cache)
        return self.norm(hidden)
