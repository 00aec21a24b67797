"""Prefix attention: decoder layers of the heads' own over the backbone's hidden states (Hydra++, arXiv 2402.05109).

A hidden state was made to guess one token; with a look back at all states before it, more can be said about those
behind. The layers are transformers' Llama layers, the identity at the start; they keep a KV cache of their own in
decoding, which grows by the accepted tokens only.

Shapes: B rows, T tokens, S slots of the cache, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from medusa.errors import RequestError
from medusa.heads.rope import BASE, rope_angles

HEAD_SIZE = 64
EXPANSION = 4


class Prefix(nn.Module):
    """hidden [B, T, H] -> hidden [B, T, H], every position having seen those before it."""

    def __init__(
        self,
        hidden_size: int,
        num_layers: int,
        heads: int | None = None,
        key_value_heads: int | None = None,
        width: int | None = None,
        eps: float = 1e-6,
        base: float = BASE,
        norm: bool = False,
    ) -> None:
        """
        Args:
            heads, key_value_heads, width: of a layer; by default heads of HEAD_SIZE, and EXPANSION hidden sizes.
            eps: of all norms.
            base: of the rope_angles.
            norm: one more behind the last layer, as Hydra++ has it.
        """
        super().__init__()
        if hidden_size % 2:
            raise RequestError(f"heads.prefix_layers needs an even hidden size, not {hidden_size}; leave it out")
        count = max(hidden_size // HEAD_SIZE, 1)
        while hidden_size % (2 * count):  # heads of one even size
            count -= 1
        count = heads or count
        self.config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=width or EXPANSION * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=count,
            num_key_value_heads=key_value_heads or count,
            rms_norm_eps=eps,
        )
        self.config._attn_implementation = "sdpa"
        self.head_size, self.base = hidden_size // count, base
        self.norm = LlamaRMSNorm(hidden_size, eps) if norm else nn.Identity()
        self.layers = nn.ModuleList(LlamaDecoderLayer(self.config, index) for index in range(num_layers))
        for name, parameter in self.layers.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what is added to the residual stream
                nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, position_ids: Tensor, mask: Tensor, cache: Cache | None = None) -> Tensor:
        """
        Args:
            position_ids: [B, T].
            mask: [B, 1, T, S] or broadcast to it: True, or 0, where a token may look.
            cache: of S - T tokens, to which these are appended; without one S is T.
        """
        turns = rope_angles(position_ids, self.head_size, hidden.dtype, self.base)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=turns, past_key_values=cache)
        return self.norm(hidden)
