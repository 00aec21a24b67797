"""The format of EAGLE-3's layer, which vLLM and SGLang load: heads of kind `eagle` with `block: gated`.

A folder contains `config.json` (of a Llama with one layer) and `model.safetensors` with these tensors, for hidden size
H and MLP width E:

    layers.0.hidden_norm.weight [H]   layers.0.input_layernorm.weight [H]   layers.0.post_attention_layernorm.weight [H]
    layers.0.self_attn.{q,k,v}_proj.weight [H, 2 H]         layers.0.self_attn.o_proj.weight [H, H]
    layers.0.mlp.{gate,up}_proj.weight [E, H]               layers.0.mlp.down_proj.weight [H, E]
    norm.weight [H]
    lm_head.weight [N, H]   d2t [N]   t2d [V]               only with a reduced vocabulary of N out of V tokens

By default EAGLE-3 reads the hidden states of three layers of the backbone. With `use_aux_hidden_state: false` it reads
only the last one, as heads of this package do. The embeddings come from the backbone, and so does the LM head of a
complete vocabulary. The server chooses how often the layer runs in a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_plausible
from medusa.config import GATED, GATED_EPS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.context_kv import BASE, attention_heads

NAMES = {  # of tensors in the state dict of `EagleHeads`, and in EAGLE-3's format
    "feature_norm.weight": "layers.0.hidden_norm.weight",
    "token_norm.weight": "layers.0.input_layernorm.weight",
    "out.weight": "layers.0.self_attn.o_proj.weight",
    "stack.norm.weight": "layers.0.post_attention_layernorm.weight",
    "stack.gate.weight": "layers.0.mlp.gate_proj.weight",
    "stack.up.weight": "layers.0.mlp.up_proj.weight",
    "stack.down.weight": "layers.0.mlp.down_proj.weight",
    "norm.weight": "norm.weight",
}
PAIR_PARTS = tuple(f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")  # parts of `pair.weight` of `EagleHeads`
COPIES = ("lm_head.weight", "embed_tokens.weight", "t2d")  # not read: the backbone's, and what follows from `d2t`


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensors with these names are an EAGLE-3 draft layer. No other format has a tensor `hidden_norm`."""
    return any(name.endswith(("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")) for name in names)


def to_eagle3(heads: Checkpoint) -> Tensors:
    """Return the tensors of `eagle` heads under the names of EAGLE-3's format."""
    size = heads.config.hidden_size
    out = {name: heads.tensors[module] for module, name in NAMES.items()}
    # The input is [hidden state ; token] in this package and [token ; hidden state] in EAGLE-3.
    for name, part in zip(PAIR_PARTS, heads.tensors["pair.weight"].split(size), strict=True):
        out[name] = part.roll(size, dims=1)
    return out


def from_eagle3(stored: Mapping[str, Tensor], published: Json, source: str) -> Checkpoint:
    """Make `eagle` heads from the tensors of a layer of EAGLE-3 and the content `published` of its `config.json`.

    Raise RequestError if the layer differs from that of `medusa.heads.eagle`, or a tensor is wrong or missing."""
    tensors = {name.replace("midlayer.", "layers.0."): stored[name] for name in stored if name not in COPIES}
    require_plausible(tensors, source)
    _require_same_layer(tensors, published, source)
    if "lm_head.weight" in stored and "medusa_num_heads" not in published:
        raise RequestError(f"{source} includes an LM head; only layers that use the backbone's LM head can be loaded")
    offsets = tensors.pop("d2t", None)
    size = len(tensors["norm.weight"])
    config = MedusaConfig(
        hidden_size=size,
        vocab_size=published.get("vocab_size"),
        num_heads=published.get("medusa_num_heads", 5),  # only files of this package have the number
        kind="eagle",
        block=GATED,
        expansion=len(tensors[NAMES["stack.gate.weight"]]) / size,
        lm_head="shared",
        vocabulary=None if offsets is None else len(offsets),
        base_model_name_or_path=published.get("base_model_name_or_path"),
    )
    require_exactly(tensors, to_eagle3(empty(config)), source)
    expected = attention_heads(size)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (heads := published.get(key)) != expected:
            raise RequestError(f"{source}: its {key} is {heads}; it must be {expected} for this hidden size")
    found = {module: tensors[name] for module, name in NAMES.items()}
    found["pair.weight"] = torch.cat([tensors[name] for name in PAIR_PARTS]).roll(size, dims=1)
    if offsets is not None:
        found["vocabulary"] = offsets.to(torch.int64) + torch.arange(len(offsets))
    return Checkpoint(config, found).require_complete(source)


def _require_same_layer(tensors: Tensors, published: Json, source: str) -> None:
    """Raise RequestError unless the EAGLE-3 layer has the inputs, config values and tensors of our `eagle` heads."""
    if (published.get("eagle_config") or {}).get("use_aux_hidden_state", True) or "fc.weight" in tensors:
        only = "only layers that read the last hidden state can be loaded (eagle_config.use_aux_hidden_state: false)"
        raise RequestError(f"{source} reads hidden states of several layers (fc); {only}")
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
