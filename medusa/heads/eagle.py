"""EAGLE heads (arXiv 2401.15077): one layer, which runs once for each head and then reads its own output.

The layer reads pairs of a feature f and the embedding e of the token after it. For head 0, f is the backbone's hidden
state. For later heads, f is the layer's previous output f''. The LM head reads f''.

    f'  = f + attention([f ; e])      keys and values: the earlier pairs of the text, and those of the path so far
    f'' = f' + blocks([f' ; e])

`blocks` are the blocks of Medusa heads. Embeddings are normalised, and so is f before the attention. A key depends only
on its own pair, so the keys of accepted tokens are cached without running the whole layer. As in EAGLE-3 and HASS,
training runs the layer on its own outputs. With a `window` of N, each head attends to the last N pairs only.

With `block: gated` the layer is that of EAGLE-3 (arXiv 2503.01840). It has norms with weights, and a Llama's gated MLP
(gate G, up U, down W), which does not read the token. The LM head reads norm(f''). With `feature_layers`, the feature
of head 0 is f = fc([h_i ; h_j ; ...]), from the hidden states h of these layers of the backbone.

    f' = f + attention([norm(f) ; norm(e)])      f'' = f' + W (SiLU(G norm(f')) * U norm(f'))

With `block: eagle1` the layer is that of EAGLE-1 and EAGLE-2 (arXiv 2406.16858). A matrix joins token and feature, and
the LM head reads f''.

    g  = fc([e ; f]) + bias      f' = g + attention(g)      f'' = f' + W (SiLU(G norm(f')) * U norm(f'))

Published layers can have further Llama layers after this one, and these variants (`VARIANTS` in `eagle_layer.py`):

    norm_before_fc         fc(norm([h_i ; h_j ; ...]))            fc_norm       fc([norm_i(h_i) ; norm_j(h_j) ; ...])
    norm_before_residual   f' = norm(f) + attention(...)          norm_output   the next head reads norm(f'')
    attention_bias         queries, keys and values with biases   qk_norm       queries and keys with norms, as in Qwen3
    fc_bias                fc with a bias

Shapes: `...` any positions or nodes, B rows, T tokens, H hidden size, E size of the features of several layers, A
attention heads, G heads of keys, D their size, L layers, k a head index.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from medusa.attention import attention
from medusa.config import MedusaConfig
from medusa.heads.blocks import Stack
from medusa.heads.context_kv import KV, Append, AttendsToText, ContextKV, Rope, joined
from medusa.heads.eagle_layer import (
    GATED,
    ORIGINAL_EAGLE,
    CachedAttention,
    DeeperLayer,
    EagleSettings,
    GatedStack,
    check_eagle,
    layer_sizes,
)
from medusa.heads.independent import MedusaHeads
from medusa.heads.sequential import SequentialHeads, State, normalised


class EagleHeads(CachedAttention, SequentialHeads, AttendsToText):
    """EAGLE heads: a decoder layer that reads pairs of a token and the feature before it.

    The feature of a position is the backbone's hidden state or, in a draft, the layer's output. The state of a draft
    node is its feature [..., H], and the joined keys and values [..., L 2 G D] of each pair on the node's path."""

    Settings = EagleSettings
    block_types = ("square", "mlp", GATED)
    foreign_block_types = (ORIGINAL_EAGLE,)
    lm_head_forms = ("own", "shared", "one")
    reads_layers = True
    follows_path = True
    form = "eagle"
    published_form = "medusa.checkpoints.eagle3:FORM"

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        check_eagle(config)

    @classmethod
    def module_counts(cls, config: MedusaConfig) -> dict[str, int]:
        return MedusaHeads.module_counts(config) | {"layer": cls.decoder_layers(config)}

    @classmethod
    def decoder_layers(cls, config: MedusaConfig) -> int:
        layer = EagleSettings.of(config).layer
        return 1 if layer is None else layer["layers"]

    @classmethod
    def output_size(cls, config: MedusaConfig) -> int:
        layer = EagleSettings.of(config).layer
        return config.hidden_size if layer is None else layer["hidden_size"]

    @classmethod
    def inner_width(cls, config: MedusaConfig) -> int | None:
        layered = config.block in (GATED, ORIGINAL_EAGLE)
        return layer_sizes(config)["width"] if layered else super().inner_width(config)

    @classmethod
    def servable(cls, config: MedusaConfig) -> bool:  # servers' layers attend to the whole text
        whole = not config.prefix_layers and EagleSettings.of(config).window is None
        return config.block == GATED and config.lm_head != "own" and whole

    def make_blocks(self) -> None:
        config, sizes = self.config, layer_sizes(self.config)
        size, eps, self.variants = sizes["hidden_size"], sizes["eps"], sizes["variants"]
        self.gated, self.joins = config.block == GATED, config.block == ORIGINAL_EAGLE
        self.make_attention(sizes, size if self.joins else 2 * size)
        self.rope, self.window = Rope(sizes["head_size"], sizes["rope"]), EagleSettings.of(config).window
        self.dropout = nn.Dropout(0.0)
        self.stack = GatedStack(sizes) if self.gated or self.joins else Stack(config, 2 * size)
        self.norm = nn.Identity()
        if self.gated:
            self.feature_norm, self.token_norm, self.norm = (nn.RMSNorm(size, eps) for _ in range(3))
        if self.joins or config.feature_layers is not None:
            inputs = 2 * size if self.joins else config.feature_size
            self.fc = nn.Linear(inputs, size, bias="fc_bias" in self.variants)
        if config.feature_layers is not None and size == config.hidden_size:  # a new layer reads the last of the layers
            nn.init.zeros_(self.fc.weight)
            nn.init.eye_(self.fc.weight[:, -size:])
        if "norm_before_fc" in self.variants:
            self.input_norm = nn.RMSNorm(config.feature_size, eps)
        if "fc_norm" in self.variants:
            count = config.feature_size // config.hidden_size
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.hidden_size, eps) for _ in range(count))
        self.embedding = (
            nn.Embedding(config.vocab_size or 1, size) if EagleSettings.of(config).embeddings == "own" else None
        )
        self.deeper = nn.ModuleList(DeeperLayer(sizes) for _ in range(sizes["layers"] - 1))

    def join(self, hidden: Tensor) -> Tensor:
        if self.config.feature_layers is None:
            return hidden
        if "norm_before_fc" in self.variants:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self.variants:
            parts = hidden.split(self.config.hidden_size, dim=-1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(hidden)

    def embed(self, ids: Tensor, backbone_embed: Callable[[Tensor], Tensor]) -> Tensor:
        if self.embedding is None:
            return super().embed(ids, backbone_embed)
        with torch.no_grad():
            return self.embedding(ids.to(self.embedding.weight.device))

    def pair_inputs(self, feature: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute what the layer reads of a pair of a feature [..., H] and a token embedding [..., H].

        Return the input of the attention [..., H or 2 H], the residual [..., H] and the token for the blocks [..., H].
        """
        if self.joins:
            both = self.fc(torch.cat([token, feature], dim=-1))
            return both, both, token
        if not self.gated:
            token = normalised(token)
            return torch.cat([normalised(feature), token], dim=-1), feature, token
        seen, token = self.feature_norm(feature), self.token_norm(token)
        residual = seen if "norm_before_residual" in self.variants else feature
        return torch.cat([seen, token], dim=-1), residual, token

    def finish(self, layer: CachedAttention, residual: Tensor, attended: Tensor, token: Tensor) -> Tensor:
        """Run the rest of a layer after its attention, which gives [..., A D]; return the layer's output [..., H]."""
        x = residual + self.dropout(layer.out(attended))
        return layer.stack(x, torch.cat([x, token], dim=-1))

    def project_kv(
        self,
        hidden: Tensor,
        token: Tensor,
        position_ids: Tensor,
        append: Append | None = None,
        seen: Tensor | None = None,
    ) -> list[KV]:
        angles = self.rope.angles(position_ids, hidden.dtype)
        found: list[KV] = []

        def store(key: Tensor, value: Tensor) -> None:
            kv = key.transpose(1, 2), value.transpose(1, 2)  # [B, G, T, D]
            found.append(kv if append is None else append(*kv, len(found)))

        layers = [self, *self.deeper]
        x, residual, token = self.pair_inputs(hidden, token)
        for layer, after in pairwise(layers):
            query, key, value = layer.project(x, angles)
            store(key, value)
            keys, values = found[-1]  # [B, G, S, D]
            if seen is None:  # the slots of a cache are positions
                seen = torch.arange(keys.shape[2], device=keys.device) <= position_ids[..., None]
            out = attention(query.transpose(1, 2), keys, values, seen[:, None])
            residual = self.finish(layer, residual, out.transpose(1, 2).flatten(-2), token)
            x = after.norm(residual)
        store(*layers[-1].keys_and_values(x, angles))
        return found

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        feature, *path = state
        x, residual, token = self.pair_inputs(feature, token)
        angles = self.angles(head, feature, context_kv)
        own: list[Tensor] = []
        for index, layer in enumerate([self, *self.deeper]):
            if index:
                x = layer.norm(residual)
            query, key, value = layer.project(x, angles)
            own.append(joined((key, value)))
            earlier = [pair.chunk(1 + len(self.deeper), dim=-1)[index] for pair in path] if self.deeper else path
            attended = layer.attend(query, [*earlier, own[-1]], context_kv, index)
            residual = self.finish(layer, residual, attended, token)
        normed = self.norm(residual)
        feature = normed if "norm_output" in self.variants else residual
        return normed, (feature, *path, torch.cat(own, dim=-1) if self.deeper else own[0])
