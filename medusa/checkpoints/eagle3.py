"""EAGLE-3's format, which vLLM and SGLang load: `config.json` of a Llama of one layer, and `model.safetensors`.

    layers.0.hidden_norm.weight  .input_layernorm  .post_attention_layernorm [H]   norm.weight [H]
    layers.0.self_attn.{q,k,v}_proj.weight [H, 2 H]   .o_proj.weight [H, H]     of the token, then of the hidden state
    layers.0.mlp.{gate,up}_proj.weight [E, H]   .down_proj.weight [H, E]
    lm_head.weight [N, H]   d2t [N]   t2d [V]                               if heads guess among N tokens only

EAGLE-3 reads hidden states of three layers through `fc`. With `use_aux_hidden_state: false` both servers give it the
last hidden state instead, which heads read here. The embeddings, and an LM head of all tokens, are the backbone's.
Heads of kind `eagle` with `block: gated` compute the same; the server chooses how often the layer runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly
from medusa.config import GATED, GATED_EPS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.context_kv import BASE, attention_heads

LAYER = "layers.0."
STEPS = 5
"""Number of heads if the file does not say."""
NAMES = {  # names of our modules, and EAGLE-3's
    "feature_norm.weight": f"{LAYER}hidden_norm.weight",
    "token_norm.weight": f"{LAYER}input_layernorm.weight",
    "out.weight": f"{LAYER}self_attn.o_proj.weight",
    "stack.norm.weight": f"{LAYER}post_attention_layernorm.weight",
    "stack.gate.weight": f"{LAYER}mlp.gate_proj.weight",
    "stack.up.weight": f"{LAYER}mlp.up_proj.weight",
    "stack.down.weight": f"{LAYER}mlp.down_proj.weight",
    "norm.weight": "norm.weight",
}
PAIR_PARTS = tuple(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")
"""The parts of `pair.weight`."""
COPIES = ("lm_head.weight", "embed_tokens.weight", "t2d")
"""Tensors in files that this package wrote, and does not read: copies from the backbone, and the inverse of d2t."""


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 layer's: no other format has this norm."""
    return any(name.endswith(("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")) for name in names)


def to_eagle3(heads: Checkpoint) -> Tensors:
    """The layer's tensors by EAGLE-3's names."""
    size = heads.config.hidden_size
    out = {name: heads.tensors[module] for module, name in NAMES.items()}
    # A pair is [hidden state ; token] here and [token ; hidden state] there.
    for name, part in zip(PAIR_PARTS, heads.tensors["pair.weight"].split(size), strict=True):
        out[name] = part.roll(size, dims=1)
    return out


def from_eagle3(stored: Mapping[str, Tensor], published: Json, source: str) -> Checkpoint:
    """Heads from the tensors of an EAGLE-3 layer and its config `published`.

    Raises:
        RequestError: a layer that differs from that of `medusa.heads.eagle`, or a tensor of the file `source` is
            missing, unknown or of the wrong shape.
    """
    tensors = {name.replace("midlayer.", LAYER): stored[name] for name in stored if name not in COPIES}
    _require_same_layer(tensors, published, source)
    if "lm_head.weight" in stored and "medusa_num_heads" not in published:
        raise RequestError(f"{source} has an LM head of its own; heads of this kind here share the backbone's")
    vocabulary = {}
    if "d2t" in tensors:
        offsets = tensors.pop("d2t").to(torch.int64)
        vocabulary["vocabulary"] = offsets + torch.arange(len(offsets))
    size = len(tensors["norm.weight"])
    config = MedusaConfig(
        hidden_size=size,
        vocab_size=published.get("vocab_size"),
        num_heads=published.get("medusa_num_heads", STEPS),
        kind="eagle",
        block=GATED,
        expansion=len(tensors[f"{LAYER}mlp.gate_proj.weight"]) / size,
        lm_head="shared",
        vocabulary=len(vocabulary["vocabulary"]) if vocabulary else None,
        base_model_name_or_path=published.get("base_model_name_or_path"),
    )
    require_exactly(tensors, to_eagle3(empty(config)), source)
    expected = attention_heads(size)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if published.get(key) != expected:
            raise RequestError(f"{source}: its {key} is {published.get(key)}; heads of this size here have {expected}")
    found = {module: tensors[name] for module, name in NAMES.items()}
    found["pair.weight"] = torch.cat([tensors[name] for name in PAIR_PARTS]).roll(size, dims=1)
    return Checkpoint(config, found | vocabulary).require_complete(source)


def _require_same_layer(tensors: Tensors, published: Json, source: str) -> None:
    """Raise RequestError if the layer reads several hidden states, has other constants, or is incomplete."""
    if (published.get("eagle_config") or {}).get("use_aux_hidden_state", True) or "fc.weight" in tensors:
        raise RequestError(
            f"{source} reads hidden states of several layers (fc); heads here read the last one "
            "(eagle_config.use_aux_hidden_state false)"
        )
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    for key, value, wanted in (
        ("rms_norm_eps", published.get("rms_norm_eps"), GATED_EPS),
        ("rope_theta", rope.get("rope_theta", published.get("rope_theta", BASE)), BASE),
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("hidden_act", published.get("hidden_act", "silu"), "silu"),
        ("num_hidden_layers", published.get("num_hidden_layers"), 1),
        ("norm_before_residual", bool(published.get("norm_before_residual")), False),
        ("norm_output", bool(published.get("norm_output")), False),
    ):
        if value != wanted:
            raise RequestError(f"{source}: its {key} is {value}; only {wanted} can be read")
    for name in (*NAMES.values(), *PAIR_PARTS):
        if name not in tensors:
            raise RequestError(f"{source} misses the tensor {name}; its heads are not complete")
