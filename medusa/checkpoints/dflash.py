"""The formats of block drafters: kind `dflash`, from z-lab (DFlash, DFlash 2), DeepSpec (DSpark) and speculators.

A folder contains `config.json` (`dflash_config.py`) and these tensors, for hidden size H, n layers of the backbone,
MLP width E, A heads of queries and G of keys with size D. i is the index of a layer:

    fc.weight [H, n H]   hidden_norm.weight [H]   norm.weight [H]
    layers.i.input_layernorm.weight [H]                     layers.i.post_attention_layernorm.weight [H]
    layers.i.self_attn.q_proj.weight [A D, H]               layers.i.self_attn.{k,v}_proj.weight [G D, H]
    layers.i.self_attn.o_proj.weight [H, A D]               layers.i.self_attn.{q,k}_norm.weight [D]
    layers.i.mlp.{gate,up}_proj.weight [E, H]               layers.i.mlp.down_proj.weight [H, E]
    markov_head.markov_w1.weight [V, r], markov_head.markov_w2.weight [V or N, r]         DSpark
    layers.i.{attention,mlp}_conv.base_kernel [2, taps, H]                                DFlash 2, and the same names:
    layers.i.{attention,mlp}_conv.kernel_projection.weight [2 taps groups, H]
    candidate_selector.{predecessor,successor}_codebook [V, r]
    candidate_selector.hidden_projection.weight [r, H]
    confidence_head.proj.weight [1, H + r or H], confidence_head.proj.bias [1]            DSpark
    embed_tokens.weight [V, H], lm_head.weight [N, H], d2t [N], t2d [V]                   as in EAGLE's files

A file `mask_embedding.pt` in the folder has a vector [H] that takes the place of the mask token's embedding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_plausible
from medusa.checkpoints.dflash_config import is_block_drafter, read_dflash_config
from medusa.checkpoints.stored import MASK_EMBEDDING, Form, Stored, load_pickled
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.dflash_layer import DflashSettings, block_sizes

LAYER_NAMES = {  # of tensors of a layer in the state dict of `DflashHeads`, and in the file
    "norm.weight": "input_layernorm.weight",
    "out.weight": "self_attn.o_proj.weight",
    "query_norm.weight": "self_attn.q_norm.weight",
    "key_norm.weight": "self_attn.k_norm.weight",
    "stack.norm.weight": "post_attention_layernorm.weight",
    "stack.gate.weight": "mlp.gate_proj.weight",
    "stack.up.weight": "mlp.up_proj.weight",
    "stack.down.weight": "mlp.down_proj.weight",
}
CONVOLUTIONS = tuple(
    f"{place}_conv.{part}" for place in ("attention", "mlp") for part in ("base_kernel", "kernel_projection.weight")
)
EDGE_NAMES = {
    "none": {},
    "markov": {"before": "markov_head.markov_w1.weight", "after": "markov_head.markov_w2.weight"},
    "pairwise": {
        "before": "candidate_selector.predecessor_codebook",
        "after": "candidate_selector.successor_codebook",
        "project.weight": "candidate_selector.hidden_projection.weight",
    },
}
CONFIDENCE = {f"confidence_head.{part}": f"confidence_head.proj.{part}" for part in ("weight", "bias")}
PARTS = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")  # parts of `pair` of a layer
NOT_READ = re.compile(r"t2d|layers\.\d+\.self_attn\.rotary_emb\.inv_freq|rotary_emb\.inv_freq")


def recognises(stored: Stored) -> bool:
    """Whether stored tensors are a block drafter."""
    return is_block_drafter(_our_name(name) for name in stored)


def to_dflash(heads: Checkpoint) -> Tensors:
    """Return the tensors of `dflash` heads under the names of these formats, without `d2t` and `t2d`."""
    have, sizes = heads.tensors, block_sizes(heads.config)
    out = {name: have[ours] for ours, name in _names(heads.config).items()}
    rows = [sizes[count] * sizes["head_size"] for count in ("heads", "key_value_heads", "key_value_heads")]
    for index in range(sizes["layers"]):
        parts = have[f"layers.{index}.pair.weight"].split(rows)
        out |= {f"layers.{index}.{name}": part for name, part in zip(PARTS, parts, strict=True)}
    if heads.config.lm_head == "one":
        out["lm_head.weight"] = have["lm_heads"][0].T
    return out


def from_dflash(stored: Mapping[str, Tensor], published: Json, source: str, asked: str) -> Checkpoint:
    """Make `dflash` heads from the tensors of a block drafter and the content `published` of its `config.json`.

    Raise RequestError if the drafter differs from those of `medusa.heads.dflash`, or a tensor is wrong or missing."""
    tensors = {name: stored[other] for other in stored if not NOT_READ.fullmatch(name := _our_name(other))}
    require_plausible(tensors, source)
    mask = _mask(stored.paths[0].parent / MASK_EMBEDDING) if isinstance(stored, Stored) else None
    config = read_dflash_config(tensors, published, source, mask is not None)
    offsets = tensors.pop("d2t", None)
    require_exactly(tensors, to_dflash(empty(config)), source)
    found = {module: tensors[name] for module, name in _names(config).items()}
    for index in range(block_sizes(config)["layers"]):
        found[f"layers.{index}.pair.weight"] = torch.cat([tensors[f"layers.{index}.{name}"] for name in PARTS])
    if config.lm_head == "one":
        found["lm_heads"] = tensors["lm_head.weight"].T[None].contiguous()
    if config.vocabulary is not None and offsets is not None:
        found["vocabulary"] = offsets.to(torch.int64) + torch.arange(len(offsets))
    if mask is not None:
        found["mask"] = mask.to(found["fc.weight"].dtype)
    return Checkpoint(config, found).require_complete(source)


def _mask(path: Path) -> Tensor | None:
    """Return the vector [H] of mask tokens that a file holds, `None` without the file.

    It holds a vector, or a dictionary with the vector as `embedding`."""
    if not path.is_file():
        return None
    found = load_pickled(path)
    vector = found.get("embedding") if isinstance(found, dict) else found
    if not isinstance(vector, Tensor) or not vector.is_floating_point():
        raise RequestError(f"{path} holds no vector; download it again")
    return vector.flatten()


def _our_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.removesuffix(".weight") if name.endswith("_codebook.weight") else name


def _names(config: MedusaConfig) -> dict[str, str]:
    """Map the names of tensors in the state dict to those in the file, for all tensors that are stored unchanged."""
    names = {name: name for name in ("fc.weight", "hidden_norm.weight", "norm.weight")}
    for index in range(block_sizes(config)["layers"]):
        names |= {f"layers.{index}.{ours}": f"layers.{index}.{theirs}" for ours, theirs in LAYER_NAMES.items()}
        if DflashSettings.of(config).conv is not None:
            names |= {f"layers.{index}.{part}": f"layers.{index}.{part}" for part in CONVOLUTIONS}
    own = DflashSettings.of(config)
    names |= {"embedding.weight": "embed_tokens.weight"} if own.embeddings == "own" else {}
    return names | EDGE_NAMES[own.edges] | (CONFIDENCE if own.confidence else {})


FORM = Form(recognises, from_dflash)
