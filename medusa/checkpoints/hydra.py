"""Reading of checkpoints of the original Hydra (zankner/Hydra; arXiv 2402.05109): `config.json` and `hydra_lm_head.pt`.

The file contains these tensors for head k and its blocks i, with hidden size H:

    hydra_mlp.{k}.{i}.linear.weight, .bias                block i
    hydra_mlp.{k}.{i}.res_connection.weight, .bias        residual matrix of the first block: (k + 2) H to H
    hydra_lm_head.{k}.weight, .bias                       the LM head (in some files hydra_lm_head.{k}.1.weight, .bias)
    prefix_embeding_layer.layers.0.*, .norm.weight        in Hydra++: a Llama layer and a norm

If the heads have dropout, the indices i are not consecutive. In the original, all blocks of a head after the first
share their weights. Here they become separate blocks with equal weights. The file also contains a copy of the
backbone's input embeddings, which is not loaded. A sample of it goes into the heads' config, so that
`medusa.fingerprint.differs` can recognise the backbone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_plausible
from medusa.checkpoints.stored import HYDRA_WEIGHTS, Form, Stored
from medusa.config import Fingerprint, MedusaConfig, PrefixSizes
from medusa.errors import RequestError
from medusa.files import Json
from medusa.fingerprint import embedding_sample
from medusa.heads.blocks import ORIGINAL_HYDRA
from medusa.loading import load_config

BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)(\.1)?\.weight")
PREFIX, EMBEDDING = "prefix_embeding_layer", "input_embed_fn.weight"
NOT_LOADED = {EMBEDDING, f"{PREFIX}.embed_tokens.weight", f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq"}


def is_hydra(stored: Stored) -> bool:
    """Whether tensors are in the file of the original Hydra's heads."""
    return any(path.name == HYDRA_WEIGHTS for path in stored.paths)


def from_hydra(stored: Mapping[str, Tensor], published: Json, source: str, asked: str) -> Checkpoint:
    """Make `hydra` heads from the tensors of the original Hydra and the content `published` of their `config.json`.

    Raise RequestError if the architecture is unknown, heads read no embeddings, or a tensor is wrong or missing."""
    tensors = dict(stored)
    arch, offset = published.get("hydra_head_arch", "mlp"), published.get("hidden_state_offset", 0)
    if arch not in ("mlp", "prefix-mlp"):  # Hydra and Hydra++
        raise RequestError(f"{source}: hydra_head_arch is {arch!r}; only mlp and prefix-mlp can be loaded")
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
    # [K, H, V] and [K, V] here; [V, H] and [V] for each head in the file
    matrices, biases = modules.pop("lm_heads").mT, modules.pop("lm_biases")
    lm_heads = [f"hydra_lm_head.{head}{suffix}" for head in range(config.num_heads)]
    names = {module: _name(module, blocks) for module in modules}
    wanted = {names[module]: tensor for module, tensor in modules.items()}
    for name, matrix, bias in zip(lm_heads, matrices, biases, strict=True):
        wanted |= {f"{name}.weight": matrix, f"{name}.bias": bias}
    require_exactly({name: tensors[name] for name in tensors if name not in NOT_LOADED}, wanted, source)
    found = {module: tensors[name].clone() for module, name in names.items()}  # no blocks with shared weights
    found["lm_heads"] = torch.stack([tensors[f"{name}.weight"] for name in lm_heads]).mT.contiguous()
    found["lm_biases"] = torch.stack([tensors[f"{name}.bias"] for name in lm_heads])
    return Checkpoint(config, found)


def _shapes(tensors: Tensors, source: str) -> tuple[MedusaConfig, list[int], str]:
    """Infer the config, the indices of a head's blocks in tensor names, and the infix (`.1` or "") of LM head names."""
    found = [(int(m[1]), int(m[2])) for m in map(BLOCK.fullmatch, tensors) if m is not None]
    blocks = sorted(block for head, block in found if head == 0)
    if not blocks:
        raise RequestError(f"{source} misses the first head's first block (hydra_mlp.0); its heads are not complete")
    heads = 1 + max(head for head, _ in found)
    require_plausible(tensors, source, head=heads)
    first = tensors[f"hydra_mlp.0.{blocks[0]}.linear.weight"]
    if first.ndim == 2 and first.shape[0] == first.shape[1]:
        raise RequestError(f"{source}: its heads do not read tokens (grounded_heads: false) and cannot be loaded")
    lm_head = next(filter(None, map(LM_HEAD.fullmatch, tensors)), None)
    if lm_head is None:
        raise RequestError(f"{source} misses the tensor hydra_lm_head.0.weight; its heads are not complete")
    sizes = (first.shape[0], tensors[lm_head[0]].shape[0], heads, len(blocks))
    return MedusaConfig(*sizes, kind="hydra", block=ORIGINAL_HYDRA), blocks, lm_head[2] or ""


def _name(module: str, blocks: list[int]) -> str:
    """Convert `module`, a name in our state dict, to Hydra's name with block indices `blocks`; not for LM heads."""
    if module.startswith("prefix."):
        return PREFIX + module.removeprefix("prefix")
    _, head, _, layer, rest = module.split(".", 4)  # stacks.{head}.layers.{layer}.{rest}
    return f"hydra_mlp.{head}.{blocks[int(layer)]}.{rest}"


def _prefix(base: str | None, source: str) -> PrefixSizes:
    """Return the sizes of Hydra++'s prefix layer: those of a layer of the backbone `base` (its folder or Hub id)."""
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
        raise RequestError(f"{source}: its prefix layer needs default RoPE and SiLU, and {base} has others")
    return {
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "width": config.intermediate_size,
        "eps": config.rms_norm_eps,
        "base": float(rope.get("rope_theta", 10_000.0)),
        "norm": True,
    }


FORM = Form(is_hydra, from_hydra)
