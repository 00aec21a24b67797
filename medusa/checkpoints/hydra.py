"""Checkpoints of the original Hydra (zankner/Hydra; arXiv 2402.05109): `config.json` and `hydra_lm_head.pt`.

    hydra_mlp.{k}.{i}.linear.weight  .bias               blocks of head k, in the order of i
    hydra_mlp.{k}.{i}.res_connection.weight  .bias       of the first, which reads (k + 2) H numbers
    hydra_lm_head.{k}.weight  .bias                      LM head of head k; or {k}.1.weight
    prefix_embeding_layer.layers.0. ...  .norm.weight    Hydra++: a Llama layer and a norm

where i counts every second module in heads that were written with dropout in between. All blocks of a head but the
first are one block there, saved under each of its names; here they are separate, and compute the same.

The file also holds copies of the backbone's embedding, which the original writes over the backbone's own. Here they are
looked at and left out: a sample of `input_embed_fn.weight` goes into the heads' config, so that another backbone is
told from theirs (`medusa.fingerprint.differs`).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from medusa.config import Fingerprint, MedusaConfig
from medusa.errors import RequestError
from medusa.fingerprint import embedding_sample
from medusa.heads.kinds import build
from medusa.loading import load_config

WEIGHTS = "hydra_lm_head.pt"
ARCHITECTURES = ("mlp", "prefix-mlp")
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight")
LM_HEAD = re.compile(r"hydra_lm_head\.(\d+)(\.1)?\.weight")
PREFIX, EMBEDDING = "prefix_embeding_layer", "input_embed_fn.weight"
LEFT_OUT = {EMBEDDING, f"{PREFIX}.embed_tokens.weight", f"{PREFIX}.layers.0.self_attn.rotary_emb.inv_freq"}


def from_original(
    tensors: dict[str, Tensor], published: dict[str, Any], source: str
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Config and tensors by our names.

    Args:
        published: the original's config.json.
        source: of the tensors, for messages.

    Raises:
        RequestError: another architecture of Hydra's, heads that see no tokens, or a tensor that is missing, unknown
            or of the wrong shape.
    """
    arch, offset = published.get("hydra_head_arch", "mlp"), published.get("hidden_state_offset", 0)
    if arch not in ARCHITECTURES:
        raise RequestError(f"{source}: hydra_head_arch is {arch!r}; only {' and '.join(ARCHITECTURES)} can be loaded")
    if offset != 0:
        raise RequestError(f"{source}: hidden_state_offset is {offset}; heads here read the last hidden state (0)")
    blocks = [(int(m[1]), int(m[2])) for m in map(BLOCK.fullmatch, tensors) if m is not None]
    places = sorted(place for head, place in blocks if head == 0)
    if not places:
        raise RequestError(f"{source} misses the first head's first block (hydra_mlp.0); its heads are not complete")
    heads = 1 + max(head for head, _ in blocks)
    if heads > len(tensors):  # an absurd index, before as many tensors are asked for
        raise RequestError(
            f"{source} names head {heads - 1} but holds {len(tensors)} tensors; its heads are not complete"
        )
    first = tensors[f"hydra_mlp.0.{places[0]}.linear.weight"]
    if first.ndim == 2 and first.shape[0] == first.shape[1]:
        raise RequestError(
            f"{source}: its heads see no tokens (grounded_heads: false), so they are not Hydra's; they cannot be loaded"
        )
    lm_head = next((match for match in map(LM_HEAD.fullmatch, tensors) if match is not None), None)
    if lm_head is None:
        raise RequestError(f"{source} misses the tensor hydra_lm_head.0.weight; its heads are not complete")
    base = published.get("base_model_name_or_path")
    backbone: Fingerprint = {"name": base}
    if EMBEDDING in tensors:
        backbone["embedding"] = embedding_sample(tensors[EMBEDDING])
    config = MedusaConfig(
        hidden_size=first.shape[0],
        vocab_size=tensors[lm_head[0]].shape[0],
        num_heads=heads,
        num_layers=len(places),
        kind="hydra",
        prefix_layers=int(arch == "prefix-mlp"),
        prefix=_prefix(tensors, base, source) if arch == "prefix-mlp" else None,
        block="hydra",
        base_model_name_or_path=base,
        backbone=backbone,
    )
    between = lm_head[2] or ""
    with torch.device("meta"):
        wanted = build(config).state_dict()
    names = {}  # theirs of each of ours, and of each head's LM head
    for ours, tensor in wanted.items():
        match ours.split("."):
            case ["stacks", head, "layers", layer, *rest]:
                theirs = {f"hydra_mlp.{head}.{places[int(layer)]}.{'.'.join(rest)}": tensor.shape}
            case ["prefix", *rest]:
                theirs = {".".join([PREFIX, *rest]): tensor.shape}
            case _:  # [K, H, V] and [K, V]
                part = "weight" if ours == "lm_heads" else "bias"
                shape = torch.Size([*tensor.shape[1:]][::-1])
                theirs = {f"hydra_lm_head.{head}{between}.{part}": shape for head in range(heads)}
        for name, shape in theirs.items():
            if name not in tensors:
                raise RequestError(f"{source} misses the tensor {name}; its heads are not complete")
            if tensors[name].shape != shape:
                raise RequestError(f"{source}: {name} has the shape {list(tensors[name].shape)}, not {list(shape)}")
        names[ours] = list(theirs)
    unknown = sorted(set(tensors) - LEFT_OUT - {name for of_ours in names.values() for name in of_ours})
    if unknown:
        raise RequestError(f"{source} holds the tensor {unknown[0]}, which belongs to no Hydra head; remove it")
    found = {ours: tensors[of_ours[0]].clone() for ours, of_ours in names.items()}  # blocks that were one part here
    for ours in ("lm_heads", "lm_biases"):
        of_heads = torch.stack([tensors[name] for name in names[ours]])
        found[ours] = of_heads.transpose(1, 2).contiguous() if ours == "lm_heads" else of_heads
    return config, found


def _prefix(tensors: dict[str, Tensor], base: str | None, source: str) -> dict[str, Any]:
    """What a Llama layer is beyond its tensors. Their config does not say; that of the backbone does.

    Raises:
        RequestError: the backbone's config cannot be had, or is not that of a Llama.
    """
    need = f"{source}: its prefix layer is made as the backbone's config says"
    way_out = "name a folder or Hub id that has it as base_model_name_or_path in the heads' config.json"
    if not base:
        raise RequestError(f"{need}; {way_out}")
    try:
        sizes = load_config(base).get_text_config(decoder=True)
    except RequestError as error:
        raise RequestError(f"{need} ({error}); {way_out}") from None
    rope = getattr(sizes, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or getattr(sizes, "hidden_act", "silu") != "silu":
        raise RequestError(f"{source}: its prefix layer is a Llama's with plain rotations and SiLU; {base} has others")
    return {
        "heads": sizes.num_attention_heads,
        "key_value_heads": sizes.num_key_value_heads,
        "width": sizes.intermediate_size,
        "eps": sizes.rms_norm_eps,
        "base": float(rope.get("rope_theta", 10_000.0)),
        "norm": True,
    }
