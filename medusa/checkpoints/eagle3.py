"""The formats of EAGLE's layers: kind `eagle` with `block: gated` (EAGLE-3) or `eagle1` (EAGLE-1 and EAGLE-2).

A folder contains `config.json` (`eagle_config.py`) and these tensors, for hidden size H, MLP width E, A heads of
queries and G of keys with size D. i is the index of a layer; most files have only the layer 0:

    layers.0.hidden_norm.weight [H]   layers.0.input_layernorm.weight [H]   layers.i.post_attention_layernorm.weight [H]
    layers.0.self_attn.q_proj.weight [A D, 2 H]             layers.0.self_attn.{k,v}_proj.weight [G D, 2 H]
    layers.i.self_attn.o_proj.weight [H, A D]               layers.i.self_attn.{q,k}_norm.weight [D]     some
    layers.i.mlp.{gate,up}_proj.weight [E, H]               layers.i.mlp.down_proj.weight [H, E]
    norm.weight [H]
    fc.weight [H, n B]            joins n layers of a backbone of hidden size B; absent if the last state is read
    input_norm.weight [n B], fc_norm.j.weight [B]           norms before it, in some
    embed_tokens.weight [V, H]                              without it, the backbone's embeddings
    lm_head.weight [N, H]                                   without it, the backbone's LM head
    d2t [N], t2d [V]                                        only if N < V; token i + d2t[i] has the index i

The authors of EAGLE-3, SpecForge, SGLang and AngelSlim write `midlayer.` for `layers.0.`, and speculators and vLLM the
names above. A later layer reads H instead of 2 H, and its norm is `input_layernorm`, or `hidden_norm` in SGLang.
EAGLE-1 and EAGLE-2 have `fc.weight [H, 2 H]` and `fc.bias`, which join a token and a hidden state, and no other norm
than `post_attention_layernorm`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_plausible
from medusa.checkpoints.dflash_config import is_block_drafter
from medusa.checkpoints.eagle_config import read_eagle_config
from medusa.checkpoints.stored import Form
from medusa.config import MedusaConfig
from medusa.files import Json
from medusa.heads.eagle_layer import GATED, ORIGINAL_EAGLE, EagleSettings, layer_sizes

LAYER_NAMES = {  # of tensors of a layer in the state dict of `EagleHeads`, and in the file
    "out.weight": "self_attn.o_proj.weight",
    "stack.norm.weight": "post_attention_layernorm.weight",
    "stack.gate.weight": "mlp.gate_proj.weight",
    "stack.up.weight": "mlp.up_proj.weight",
    "stack.down.weight": "mlp.down_proj.weight",
}
PARTS = tuple(f"self_attn.{part}_proj." for part in "qkv")  # parts of `pair` of `EagleHeads`
OTHER_NAMES = (  # names that other projects write for those above
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\.(?!\d)"), "layers.0."),
    (re.compile(r"^midlayer\."), "layers."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
NOT_READ = re.compile(r"t2d|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def is_eagle(names: Iterable[str]) -> bool:
    """Whether tensors with these names are a layer of EAGLE, which has `hidden_norm`, or `fc` and a layer.

    Block drafters have `fc` and layers, too, and are told apart first (`medusa.checkpoints.dflash`)."""
    known = {_our_name(name) for name in names}
    if is_block_drafter(known):
        return False
    return "layers.0.hidden_norm.weight" in known or {"fc.weight", "layers.0.mlp.gate_proj.weight"} <= known


def to_eagle3(heads: Checkpoint) -> Tensors:
    """Return the tensors of `eagle` heads under the names of EAGLE's formats, without `d2t` and `t2d`."""
    config, tensors = heads.config, heads.tensors
    sizes, out = layer_sizes(config), {name: tensors[module] for module, name in _names(config).items()}
    rows = [sizes[count] * sizes["head_size"] for count in ("heads", "key_value_heads", "key_value_heads")]
    for module, prefix, rolled in _pairs(config):
        for kind in ("weight", "bias"):
            if (whole := tensors.get(f"{module}pair.{kind}")) is not None:
                for name, part in zip(PARTS, whole.split(rows), strict=True):
                    out[f"{prefix}{name}{kind}"] = part.roll(rolled, dims=1) if rolled and kind == "weight" else part
    if config.lm_head == "one":
        out["lm_head.weight"] = tensors["lm_heads"][0].T
    return out


def from_eagle3(stored: Mapping[str, Tensor], published: Json, source: str, asked: str) -> Checkpoint:
    """Make `eagle` heads from the tensors of a layer of EAGLE and the content `published` of its `config.json`.

    Raise RequestError if the layer differs from that of `medusa.heads.eagle`, or a tensor is wrong or missing."""
    names = {_our_name(name): name for name in stored}
    tensors = {name: stored[other] for name, other in names.items() if not NOT_READ.fullmatch(name)}
    require_plausible(tensors, source)
    _use_one_norm(tensors)
    config = read_eagle_config(tensors, published, source)
    if config.lm_head == "shared":
        tensors.pop("lm_head.weight", None)  # a copy of the backbone's
    elif "lm_head.weight" not in tensors and "embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"]  # tied
    offsets = tensors.pop("d2t", None)
    require_exactly(tensors, to_eagle3(empty(config)), source)
    found = {module: tensors[name] for module, name in _names(config).items()}
    for module, prefix, rolled in _pairs(config):
        for kind in ("weight", "bias"):
            if f"{prefix}{PARTS[0]}{kind}" in tensors:
                whole = torch.cat([tensors[f"{prefix}{name}{kind}"] for name in PARTS])
                found[f"{module}pair.{kind}"] = whole.roll(rolled, dims=1) if rolled and kind == "weight" else whole
    if config.lm_head == "one":
        found["lm_heads"] = tensors["lm_head.weight"].T[None].contiguous()
    if config.vocabulary is not None and offsets is not None:
        found["vocabulary"] = offsets.to(torch.int64) + torch.arange(len(offsets))
    return Checkpoint(config, found).require_complete(source)


def _our_name(name: str) -> str:
    for pattern, ours in OTHER_NAMES:
        name = pattern.sub(ours, name)
    return name


def _use_one_norm(tensors: Tensors) -> None:
    """Keep one norm in front of the attention of each layer after the first: `input_layernorm`, also from SGLang."""
    for name in [name for name in tensors if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name)]:
        norm = tensors.pop(name)  # vLLM has both, and does not use this one
        tensors.setdefault(name.replace("hidden_norm", "input_layernorm"), norm)


def _pairs(config: MedusaConfig) -> list[tuple[str, str, int]]:
    """For each layer: how its names begin in the state dict and in the file, and by how many columns to roll `pair`.

    The first layer's input is [hidden state ; token] in this package, and [token ; hidden state] in EAGLE-3."""
    first = 0 if config.block == ORIGINAL_EAGLE else layer_sizes(config)["hidden_size"]
    later = range(1, layer_sizes(config)["layers"])
    return [("", "layers.0.", first), *((f"deeper.{index - 1}.", f"layers.{index}.", 0) for index in later)]


def _names(config: MedusaConfig) -> dict[str, str]:
    """Map the names of tensors in the state dict to those in the file, for all tensors that are stored unchanged."""
    names: dict[str, str] = {}
    variants = layer_sizes(config)["variants"]
    for module, prefix, _ in _pairs(config):
        names |= {module + ours: prefix + theirs for ours, theirs in LAYER_NAMES.items()}
        if "qk_norm" in variants:
            names[f"{module}query_norm.weight"] = f"{prefix}self_attn.q_norm.weight"
            names[f"{module}key_norm.weight"] = f"{prefix}self_attn.k_norm.weight"
        if module:
            names[f"{module}norm.weight"] = f"{prefix}input_layernorm.weight"
    if config.block == GATED:
        names["feature_norm.weight"] = "layers.0.hidden_norm.weight"
        names["token_norm.weight"] = "layers.0.input_layernorm.weight"
        names["norm.weight"] = "norm.weight"
    same = ["fc.weight"] if config.block == ORIGINAL_EAGLE or config.feature_layers is not None else []
    same += ["fc.bias"] if "fc_bias" in variants else []
    same += ["input_norm.weight"] if "norm_before_fc" in variants else []
    if "fc_norm" in variants:
        same += [f"fc_norm.{index}.weight" for index in range(config.feature_size // config.hidden_size)]
    if EagleSettings.of(config).embeddings == "own":
        names["embedding.weight"] = "embed_tokens.weight"
    return names | {name: name for name in same}


FORM = Form(is_eagle, from_eagle3)
