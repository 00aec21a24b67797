"""Reading of checkpoints of the original Hydra (zankner/Hydra; arXiv 2402.05109): `config.json` and `hydra_lm_head.pt`.

The file contains these tensors for head k and its blocks i, with hidden size H:

    hydra_mlp.{k}.{i}.linear.weight, .bias                block i
    hydra_mlp.{k}.{i}.res_connection.weight, .bias        residual matrix of the first block: (k + 2) H to H
    hydra_lm_head.{k}.weight, .bias                       the LM head; or {k}.1.weight, {k}.1.bias
    prefix_embeding_layer.layers.0.*, .norm.weight        in Hydra++: a Llama layer and a norm

If the heads have dropout, the indices i are not consecutive. In the original, all blocks of a head after the first
share their weights. Here they become separate blocks with equal weights. The file also contains a copy of the
backbone's input embeddings, which is not loaded. A sample of it goes into the heads' config, so that
`medusa.fingerprint.differs` can recognise the backbone.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_plausible
from medusa.config import ORIGINAL_HYDRA, Fingerprint, MedusaConfig, PrefixSizes
from medusa.errors import RequestError
from medusa.files import Json
from medusa.fingerprint import embedding_sample
from medusa.loading import load_config

ARCHITECTURES = ("mlp", "prefix-mlp")
"""The values of `hydra_head_arch` that can be loaded: Hydra and Hydra++."""
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)(\.1)?\.weight")
PREFIX, EMBEDDING = "prefix_embeding_layer", "input_embed_fn.weight"
LEFT_OUT = {EMBEDDING, f"{PREFIX}.embed_tokens.weight", f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq"}
"""Tensors in the file that are not loaded."""


def from_hydra(tensors: Tensors, published: Json, source: str) -> Checkpoint:
    """Make `hydra` heads from the tensors of the original Hydra and the content `published` of their `config.json`.

    Raises:
        RequestError: the architecture is not supported, the heads do not read tokens, or a tensor is wrong or missing.
    """
    arch, offset = published.get("hydra_head_arch", "mlp"), published.get("hidden_state_offset", 0)
    if arch not in ARCHITECTURES:
        raise RequestError(f"{source}: hydra_head_arch is {arch!r}; only {' and '.join(ARCHITECTURES)} can be loaded")
    if offset != 0:
        raise RequestError(f"{source}: hidden_state_offset is {offset}; only 0, the last hidden state, can be loaded")
    config, blocks, suffix = _shapes(tensors, source)
    base = published.get("base_model_name_or_path")
    backbone: Fingerprint = {"name": base}
    if EMBEDDING in tensors:
        backbone["embedding"] = embedding_sample(tensors[EMBEDDING])
    config = replace(config, base_model_name_or_path=base, backbone=backbone)
    if arch == "prefix-mlp":
        config = replace(config, prefix_layers=1, prefix=_prefix(base, source))
    modules = empty(config).tensors
    names = {module: _names(module, config.num_heads, blocks, suffix) for module in modules}
    wanted: Tensors = {}
    for module, tensor in modules.items():
        if module in ("lm_heads", "lm_biases"):  # [K, H, V] and [K, V] here; [V, H] and [V] for each head in the file
            wanted |= zip(names[module], tensor.mT if module == "lm_heads" else tensor, strict=True)
        else:
            wanted[names[module][0]] = tensor
    require_exactly({name: tensors[name] for name in tensors if name not in LEFT_OUT}, wanted, source)
    # Cloned, so that blocks do not share weights.
    found = {module: tensors[name].clone() for module, (name, *_) in names.items()}
    found["lm_heads"] = torch.stack([tensors[name] for name in names["lm_heads"]]).transpose(1, 2).contiguous()
    found["lm_biases"] = torch.stack([tensors[name] for name in names["lm_biases"]])
    return Checkpoint(config, found)


def _shapes(tensors: Tensors, source: str) -> tuple[MedusaConfig, list[int], str]:
    """Derive the config, the indices i of a head's blocks, and the ending of LM heads' names (empty or `.1`)."""
    found = [(int(m[1]), int(m[2])) for m in map(BLOCK.fullmatch, tensors) if m is not None]
    blocks = sorted(block for head, block in found if head == 0)
    if not blocks:
        raise RequestError(f"{source} misses the first head's first block (hydra_mlp.0); its heads are not complete")
    heads = 1 + max(head for head, _ in found)
    require_plausible(heads, tensors, source)
    first = tensors[f"hydra_mlp.0.{blocks[0]}.linear.weight"]
    if first.ndim == 2 and first.shape[0] == first.shape[1]:
        raise RequestError(
            f"{source}: its heads do not read tokens (grounded_heads: false); only Hydra heads, which do, can be loaded"
        )
    lm_head = next(filter(None, map(LM_HEAD.fullmatch, tensors)), None)
    if lm_head is None:
        raise RequestError(f"{source} misses the tensor hydra_lm_head.0.weight; its heads are not complete")
    sizes = (first.shape[0], tensors[lm_head[0]].shape[0], heads, len(blocks))
    return MedusaConfig(*sizes, kind="hydra", block=ORIGINAL_HYDRA), blocks, lm_head[2] or ""


def _names(module: str, num_heads: int, blocks: list[int], suffix: str) -> list[str]:
    """Convert a name in the state dict to names in Hydra's file: one for each head if all LM heads are one tensor."""
    match module.split("."):
        case ["stacks", head, "layers", layer, *rest]:
            return [f"hydra_mlp.{head}.{blocks[int(layer)]}.{'.'.join(rest)}"]
        case ["prefix", *rest]:
            return [".".join([PREFIX, *rest])]
    part = "weight" if module == "lm_heads" else "bias"
    return [f"hydra_lm_head.{head}{suffix}.{part}" for head in range(num_heads)]


def _prefix(base: str | None, source: str) -> PrefixSizes:
    """Read the sizes of Hydra++'s prefix layer from the config of the backbone, whose layers have the same sizes."""
    need = f"{source}: the sizes of its prefix layer are in the backbone's config"
    way_out = "name a folder or Hub id that has it as base_model_name_or_path in the heads' config.json"
    if not base:
        raise RequestError(f"{need}; {way_out}")
    try:
        config = load_config(base).get_text_config(decoder=True)
    except RequestError as error:
        raise RequestError(f"{need} ({error}); {way_out}") from None
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or getattr(config, "hidden_act", "silu") != "silu":
        raise RequestError(
            f"{source}: its prefix layer needs a backbone with default RoPE and SiLU, and {base} has others"
        )
    return {
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "width": config.intermediate_size,
        "eps": config.rms_norm_eps,
        "base": float(rope.get("rope_theta", 10_000.0)),
        "norm": True,
    }
