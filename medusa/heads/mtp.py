"""MTP heads: a layer for multi-token prediction, which the model brings along, runs once for each head.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) and other models are trained with such layers, which transformers calls
`MtpLayer`. As in `medusa.heads.eagle`, the layer reads pairs of a feature f and the embedding e of the token after it.
For head 0, f is the backbone's hidden state. For later heads, f is the layer's previous output f'.

    g = P [norm(e) ; norm(f)]      f' = norm(block(g))

P is a matrix, `block` a decoder layer of the model, with the attention and the experts of its other layers, and the
backbone's LM head reads f'. The block is transformers' own module. Only its attention to cached keys is ours: the block
calls the function `_attention`, as it would call sdpa.

A model can have several MTP layers, one for each further token. Here the first of them runs for all heads, as in
FastMTP (arXiv 2509.18362), so that one layer drafts as many tokens as asked.

Shapes: `...` any positions or nodes, B rows, T tokens, M positions of a call, H hidden size, A attention heads, G heads
of keys, D their size, E the size of values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer, MtpModel

from medusa.config import FILES_ONLY, KindSettings, MedusaConfig
from medusa.errors import RequestError, first_line
from medusa.files import Json
from medusa.heads import NATIVE
from medusa.heads.context_kv import KV, Append, AttendsToText, ContextKV, Rope, attend_to_path, joined
from medusa.heads.independent import MedusaHeads
from medusa.heads.sequential import SequentialHeads, State
from medusa.native_layers import native_config, read_layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

ATTENTION = "medusa_mtp"  # the name of `_attention` among transformers' attention functions
ATTENTION_TYPES = ("full_attention", "sliding_attention")  # the types of layers whose keys can be those of a tree
NOT_MADE = (AssertionError, AttributeError, ImportError, LookupError, NotImplementedError, TypeError, ValueError)
"""What transformers raises if it cannot make the layer. A ValueError names the reason; the others come from the parts.

It puts the layer together from the parts of any decoder, without asking whether they fit. Of 184 model types, given
`num_mtp_layers: 1`, transformers 5.23 made 38, refused 77, and stopped at some part of 69."""
SPECIAL = ("chain_hidden_post_norm", "mtp_hidden_states_first")  # settings of layers with another input or norm
Attend = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor]
"""Attends with queries [1, A, M, D], keys [1, G, M, D], values [1, G, M, E], a scale and sinks (`None`, or [A]).

It returns [1, M, A, E]."""


@dataclass
class MtpSettings(KindSettings):
    """The settings of heads of kind `mtp`."""

    mtp: Json | None = field(default=None, metadata=FILES_ONLY)
    """The config of the model that the layer comes from, as in the model's `config.json`."""


class MtpHeads(SequentialHeads, AttendsToText):
    """MTP heads: a decoder layer of the model that reads pairs of a token and the feature before it.

    The state of a draft node is its feature [..., H], and the joined key and value [..., G (D + E)] of each pair on the
    node's path."""

    Settings = MtpSettings
    block_types = (NATIVE,)
    lm_head_forms = ("shared",)
    comes_with_model = True
    learning_rate_scale = 0.05  # a trained layer: 5e-5 for a hidden size of 4096 (FastMTP)
    follows_path = True

    @classmethod
    def check(cls, config: MedusaConfig) -> None:
        content = MtpSettings.of(config).mtp
        if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
            raise RequestError(f"the config's mtp is {content!r}; it must be a model's config, with its model_type")
        if config.num_layers != 1 or config.prefix_layers:
            raise RequestError(f"heads.kind {NATIVE} needs heads.layers 1, and no heads.prefix_layers")

    @classmethod
    def config_from(cls, backbone: PretrainedConfig, num_heads: int) -> MedusaConfig:
        return native_config(backbone, num_heads)

    @classmethod
    def module_counts(cls, config: MedusaConfig) -> dict[str, int]:
        return MedusaHeads.module_counts(config)

    def start_from_model(self, model: PreTrainedModel) -> None:
        self.load_state_dict(read_layer(model, self.device), strict=False)  # the vocabulary follows

    def make_blocks(self) -> None:
        layers = new_layers(MtpSettings.of(self.config).mtp or {})
        self.layer = cast("MtpLayer", layers.layers[0])
        self.rope = ModelRope(layers)
        attention = self.layer.mtp_block.self_attn
        self.window = getattr(attention, "sliding_window", None)
        self.sinks = int(getattr(attention, "sinks", None) is not None)

    def _input(self, feature: Tensor, token: Tensor) -> Tensor:
        """Compute the block's input [..., H] from features [..., H] and token embeddings [..., H]."""
        return self.layer.eh_proj(torch.cat([self.layer.enorm(token), self.layer.hnorm(feature)], dim=-1))

    def project_kv(
        self,
        hidden: Tensor,
        token: Tensor,
        position_ids: Tensor,
        append: Append | None = None,
        seen: Tensor | None = None,
    ) -> list[KV]:
        found: list[KV] = []

        def keep(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
            found.append((key, value) if append is None else append(key, value, 0))
            return query.transpose(1, 2)[..., :1].expand(-1, -1, -1, value.shape[-1])  # only the shape matters here

        block = self.layer.mtp_block
        norm, attention = cast("nn.Module", block.input_layernorm), cast("nn.Module", block.self_attn)
        attention(
            hidden_states=norm(self._input(hidden, token)),
            position_embeddings=self.rope.angles(position_ids, hidden.dtype),
            attention_mask=None,
            attend=keep,
        )
        return found

    def step(self, head: int, state: State, token: Tensor | None, context_kv: ContextKV | None) -> tuple[Tensor, State]:
        assert token is not None
        feature, *path = state
        shape, own = feature.shape[:-1], list(path)
        angles = self.angles(head, feature, context_kv)

        def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
            query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [M, A or G, D or E]
            own.append(joined((key, value)).unflatten(0, shape))
            out = attend_to_path(query.unflatten(0, shape), own, key.shape[1], context_kv, scale=scale, sinks=sinks)
            return out.reshape(1, -1, *out.shape[-2:])

        flat = self._input(feature, token).reshape(1, -1, feature.shape[-1])
        out = self.layer.mtp_block(
            flat,
            position_embeddings=tuple(part.expand(*shape, -1).reshape(1, flat.shape[1], -1) for part in angles),
            attention_mask=None,
            attend=attend,
        )
        feature = cast("nn.Module", self.layer.post_norm)(out).reshape(*shape, -1)
        return feature, (feature, *own)


class ModelRope(Rope):
    """The rotations of a model's own module for rotary embeddings, in the interface of `Rope`.

    A pair counts at the position of its token, as in transformers: one after the position of its feature."""

    def __init__(self, layers: MtpModel) -> None:
        """Make a new rotary embedding on the CPU, as that of `layers` may be on the meta device, without values."""
        kind = cast("Callable[..., nn.Module]", type(layers.rotary_emb))
        with torch.device("cpu"):
            self.rotary = kind(config=layers.config)
        by_layer = "layer_type" in inspect.signature(self.rotary.forward).parameters
        self.keywords = {"layer_type": layers.config.layer_types[0]} if by_layer else {}
        self.axes = (3, 1, -1) if hasattr(self.rotary, "mrope_section") else (1, -1)  # of text, all three are equal

    def angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        self.rotary.to(position_ids.device)
        like = torch.empty(0, dtype=dtype, device=position_ids.device)
        cos, sin = self.rotary(like, position_ids=(position_ids.reshape(1, -1) + 1).expand(self.axes), **self.keywords)
        return cos.reshape(*position_ids.shape, -1), sin.reshape(*position_ids.shape, -1)


def new_layers(content: Json) -> MtpModel:
    """Make the first MTP layer of a model, whose weights have no values yet, from the content of its `config.json`.

    The layer attends by the functions in the keyword `attend`. Raise RequestError if the model has no such layer."""
    name = content.get("model_type")
    try:
        config = AutoConfig.for_model(**content).get_mtp_config()
        with torch.device("meta"):  # a model without memory, from which transformers takes the classes of the parts
            skeleton = AutoModelForCausalLM.from_config(config)
        layers = MtpModel(skeleton, 1)
    except NOT_MADE as error:
        raise RequestError(f"transformers makes no MTP layer of a {name}: {first_line(error)}") from error
    if whys := _obstacles(layers):
        why = " and ".join(whys)
        raise RequestError(f"the MTP layer of a {name} cannot draft trees: {why}; take another drafter, such as ngram")
    layers.config._attn_implementation = ATTENTION
    return layers


def _obstacles(layers: MtpModel) -> list[str]:
    """Say why the first of the `layers` cannot draft trees, in words; empty if it can."""
    block, kinds = layers.layers[0].mtp_block, getattr(layers.config, "layer_types", None)
    found = [f"its config has {key}" for key in SPECIAL if getattr(layers.config, key, None) is not None]
    found += [f"it has no {part}" for part in ("input_layernorm", "self_attn") if not hasattr(block, part)]
    if kinds and kinds[0] not in ATTENTION_TYPES:
        found.append(f"it is of type {kinds[0]}")
    if layers.rotary_emb is None:
        found.append("it has no rotary embeddings")
    if getattr(layers.config, "mtp_use_dedicated_embeddings", False):
        found.append("it has embeddings of its own")
    return found


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Attend,
    scaling: float,
    s_aux: Tensor | None = None,
    **settings: object,
) -> tuple[Tensor, None]:
    """Attend by the function `attend`, a keyword of the block's forward (see transformers' AttentionInterface).

    `s_aux` is transformers' name for the sinks [A]."""
    return attend(query, key, value, scaling, s_aux), None


AttentionInterface.register(ATTENTION, _attention)
