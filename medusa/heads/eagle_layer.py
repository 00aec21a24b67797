"""The settings of EAGLE heads, and the parts of their decoder layers: attention with cached keys, and a gated MLP.

Shapes: `...` any positions or nodes, H hidden size of the layer, A attention heads, G heads of keys, D their size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, TypedDict

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F

from medusa.config import FILES_ONLY, KindSettings, MedusaConfig, require_whole, size_error
from medusa.errors import RequestError, choose_one_of
from medusa.files import Json
from medusa.heads.context_kv import BASE, KV, ContextKV, apply_rope, attend_to_path, attention_heads

GATED, GATED_EPS = "gated", 1e-6  # the block of EAGLE-3, and the epsilon of all norms in its layer
ORIGINAL_EAGLE = "eagle1"  # the block of the layer of EAGLE-1 and EAGLE-2
EMBEDDINGS = ("own", "shared")
VARIANTS = ("attention_bias", "fc_bias", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "qk_norm")


class LayerSizes(TypedDict):
    """The sizes of the decoder layers of `eagle` heads."""

    hidden_size: int
    width: int  # the size of the MLP's hidden layer
    layers: int  # the number of decoder layers
    heads: int  # the number of attention heads
    key_value_heads: int
    head_size: int
    eps: float  # the epsilon of all norms
    rope: Json  # the parameters of the rotary embeddings, with the names of transformers' `rope_parameters`
    variants: list[str]  # some of `VARIANTS`, which are explained in `medusa.heads.eagle`


@dataclass
class EagleSettings(KindSettings):
    """The settings of heads of kind `eagle`."""

    window: Annotated[int | None, Ge(1)] = None
    """Number of last tokens to which heads of kind eagle attend, such as 256; by default all (docs/kinds.md)."""
    layer: LayerSizes | None = field(default=None, metadata=FILES_ONLY)
    """The sizes of the decoder layers; `None`: one layer with default sizes."""
    embeddings: str = field(default="shared", metadata=FILES_ONLY)
    """`shared`: heads read the backbone's input embeddings. `own`: they have input embeddings."""


def check_eagle(config: MedusaConfig) -> None:
    """Raise RequestError if settings of `eagle` heads are invalid, or do not go together."""
    own, layered = EagleSettings.of(config), config.block in (GATED, ORIGINAL_EAGLE)
    if own.embeddings not in EMBEDDINGS:
        raise RequestError(f"heads.embeddings is {own.embeddings!r}; {choose_one_of(own.embeddings, EMBEDDINGS)}")
    if layered and config.num_layers != 1:
        raise RequestError(f"heads.block {config.block} needs heads.layers 1; take square or mlp")
    if config.feature_layers is not None and (config.block != GATED or config.prefix_layers):
        raise RequestError(f"heads.feature_layers needs heads.block={GATED} without heads.prefix_layers")
    for name, default in {"layer": None, "embeddings": "shared"}.items():
        if getattr(own, name) != default and not layered:
            raise RequestError(f"the config's {name} needs kind eagle with block {GATED}, not {config.block}")
    if config.lm_head == "one" and not layered:
        raise RequestError(f"heads.lm_head one needs heads.kind eagle with heads.block {GATED}; take own or shared")
    if own.layer is not None:
        check_sizes(own.layer)
        apart = config.feature_layers is not None and config.lm_head == "one"
        if own.layer["hidden_size"] != config.hidden_size and not (apart and own.embeddings == "own"):
            needs = "feature_layers, and an LM head and embeddings of their own"
            raise RequestError(f"heads with another hidden size than the backbone's need {needs}")
    if own.window is not None:
        require_whole("window", own.window, 1)
        if own.window < config.num_heads:
            raise RequestError(f"heads.window is {own.window}; it must be at least heads.num, {config.num_heads}")
        if own.layer is not None and own.layer["layers"] > 1:
            raise RequestError("heads.window belongs to kind eagle with one decoder layer; leave it out")


def check_sizes(layer: LayerSizes) -> None:
    """Raise RequestError if a size of the decoder layers is invalid."""
    keys = LayerSizes.__annotations__
    if not isinstance(layer, dict) or set(layer) != set(keys):
        raise RequestError(f"the config's layer is {layer!r}; its keys must be {', '.join(sorted(keys))}")
    for key, size in layer.items():
        if key == "rope":
            wrong = "" if isinstance(size, dict) else "an object"
        elif key == "variants":
            wrong = "" if isinstance(size, list) else "a list"
        else:
            wrong = size_error(key, size)
        if wrong:
            raise RequestError(f"the config's layer has {key} {size!r}; it must be {wrong}")
    for variant in layer["variants"]:
        if variant not in VARIANTS:
            choice = choose_one_of(str(variant), VARIANTS)
            raise RequestError(f"the config's layer has the variant {variant!r}; {choice}")
    if layer["heads"] % layer["key_value_heads"]:
        raise RequestError("the config's layer has heads that are no multiple of its key_value_heads")


def layer_sizes(config: MedusaConfig) -> LayerSizes:
    """Return the sizes of the layers of `eagle` heads: those of the config, or one layer as wide as the backbone."""
    given = EagleSettings.of(config).layer
    return default_sizes(config) if given is None else given


def default_sizes(config: MedusaConfig) -> LayerSizes:
    """Return the sizes of one layer as wide as the backbone."""
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
    """A Llama layer: one after the first of `eagle` heads, or one of `dflash` heads. It reads no token."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes["hidden_size"], sizes["eps"])
        self.make_attention(sizes, sizes["hidden_size"])
        self.stack = GatedStack(sizes)


class GatedStack(nn.Module):
    """Llama's residual MLP: x + W (SiLU(G n) * (U n)), n = norm(x). G, U, W: gate, up, down. W starts at zero."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        size, inner = sizes["hidden_size"], sizes["width"]
        self.norm = nn.RMSNorm(size, sizes["eps"])
        self.gate, self.up = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, size, bias=False)
        nn.init.zeros_(self.down.weight)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # z has the token, which only EAGLE-3's attention reads
        return x + self.dropout(self.mlp(self.norm(x)))

    def mlp(self, inner: Tensor) -> Tensor:
        """Compute W (SiLU(G n) * (U n)) of n = `inner` [..., H]."""
        mixed: Tensor = self.down(F.silu(self.gate(inner)) * self.up(inner))
        return mixed
