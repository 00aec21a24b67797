"""Read EAGLE-3's format, which vLLM and SGLang load: the `config.json` of a Llama of one layer and `model.safetensors`.

    layers.0.hidden_norm.weight  .input_layernorm  .post_attention_layernorm [H]   norm.weight [H]
    layers.0.self_attn.{q,k,v}_proj.weight [H, 2 H]   .o_proj.weight [H, H]     of the token, then of the hidden state
    layers.0.mlp.{gate,up}_proj.weight [E, H]   .down_proj.weight [H, E]
    lm_head.weight [N, H]   d2t [N]   t2d [V]                               if heads guess among N tokens only

EAGLE-3 reads hidden states of three layers through `fc`. With `use_aux_hidden_state: false` both servers give it the
last hidden state instead, as heads here read it. The embeddings, and an LM head of all tokens, are the backbone's.
Heads of kind `eagle` with `block: gated` compute the same; how often the layer runs is the server's choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Tensors
from medusa.config import GATED, GATED_EPS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.rope import BASE, attention_heads

LAYER = "layers.0."
STEPS = 5
"""Number of heads if the file does not say."""
NAMES = {  # ours, EAGLE-3's
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
"""The parts of our `pair.weight`."""
COPIES = ("lm_head.weight", "embed_tokens.weight")
"""Copies of the backbone's tensors in files that we wrote: rows of its LM head, and its embeddings."""


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 layer's: no other format has this norm."""
    return any(name.endswith(("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")) for name in names)


def from_eagle3(stored: Mapping[str, Tensor], published: Json, source: str) -> tuple[MedusaConfig, Tensors]:
    """Config and tensors by our names.

    Raises:
        RequestError: a layer that differs from ours, or a tensor that is missing or unknown.
    """
    tensors = {name.replace("midlayer.", LAYER): stored[name] for name in stored if name != "t2d"}
    _require_our_layer(tensors, published, source)
    tokens = None
    if "d2t" in tensors:
        offsets = tensors.pop("d2t").to(torch.int64)
        tokens = offsets + torch.arange(len(offsets))
    if "lm_head.weight" in tensors and "medusa_num_heads" not in published:
        raise RequestError(f"{source} has an LM head of its own; heads of this kind here share the backbone's")
    unknown = sorted(set(tensors) - {*NAMES.values(), *PAIR_PARTS, *COPIES})
    if unknown:
        raise RequestError(f"{source} holds the tensor {unknown[0]}, which belongs to no head; remove it")
    size = len(tensors["norm.weight"])
    config = MedusaConfig(
        hidden_size=size,
        vocab_size=published.get("vocab_size"),
        num_heads=published.get("medusa_num_heads", STEPS),
        kind="eagle",
        block=GATED,
        expansion=len(tensors[f"{LAYER}mlp.gate_proj.weight"]) / size,
        lm_head="shared",
        vocabulary=None if tokens is None else len(tokens),
        base_model_name_or_path=published.get("base_model_name_or_path"),
    )
    for name in PAIR_PARTS:
        if tensors[name].shape != (size, 2 * size):
            raise RequestError(f"{source}: {name} has the shape {list(tensors[name].shape)}, not {[size, 2 * size]}")
    expected = attention_heads(size)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if published.get(key) != expected:
            raise RequestError(f"{source}: its {key} is {published.get(key)}; heads of this size here have {expected}")
    # A pair is [token ; hidden state] there and [hidden state ; token] here.
    pair = torch.cat([tensors[name] for name in PAIR_PARTS]).roll(size, dims=1)
    ours = {name: tensors[theirs] for name, theirs in NAMES.items()} | {"pair.weight": pair}
    return config, ours if tokens is None else ours | {"vocabulary": tokens}


def _require_our_layer(tensors: Tensors, published: Json, source: str) -> None:
    """Raise RequestError if the layer reads several hidden states, has other constants than ours, or is incomplete."""
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
