"""The published format of Medusa heads: names of tensors that FasterDecoding, TGI and LoRAX share.

One set for each head h and residual block l of L, in torch's [out, in] layout:

    {h}.{l}.linear.weight [H, H]   {h}.{l}.linear.bias [H]      square block (FasterDecoding, TGI, LoRAX)
    {h}.{l}.up.weight [E, H]  .up.bias [E]  .down.weight [H, E]  .down.bias [H]      MLP block (ours)
    {h}.{L}.weight [V, H]                                        own LM head; absent if heads share the backbone's

Other programs load files of square heads as they are. The number of heads and blocks and all sizes are read from the
tensors, because published configs say 2 heads where the file holds 5.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_vocabulary
from medusa.checkpoints.names import Found
from medusa.config import OUR_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json

# Our parameter and the published name of its tensor, for each kind of block.
PARTS = {
    "square": {"weight": "linear.weight", "bias": "linear.bias"},
    "mlp": {"up": "up.weight", "up_bias": "up.bias", "down": "down.weight", "down_bias": "down.bias"},
}
TENSOR_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<part>(?:linear\.|up\.|down\.)?(?:weight|bias))")


def to_published(checkpoint: Checkpoint) -> Tensors:
    """One tensor for each head under its published name; heads without a published form keep our names."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not config.is_published:
        return tensors
    out = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            for ours, published in PARTS[config.block].items():
                stacked = tensors[f"blocks.{layer}.{ours}"][head]  # matrices [in, out], biases [1, out]
                out[f"{head}.{layer}.{published}"] = stacked[0] if "bias" in published else stacked.T
        if config.lm_head == "own":
            out[f"{head}.{config.num_layers}.weight"] = tensors["lm_heads"][head].T
    return out


def from_published(found: Found, published: Json, source: str) -> Checkpoint:
    """Heads from tensors with published names.

    Args:
        found: the tensors, and their names in the file.
        published: the config that came with them.
        source: the file or folder, for messages.

    Raises:
        RequestError: a tensor is missing, unknown or of the wrong shape.
    """
    config = _config_of(found, published, source)
    require_exactly(found.tensors, to_published(empty(config)), source, found.called)
    stacked = _stacked(found.tensors, config)
    if found.vocabulary is not None:
        vocab_size = published.get("vocab_size") or 1 + int(found.vocabulary.max())
        config = replace(config, vocabulary=len(found.vocabulary), vocab_size=vocab_size)
        require_vocabulary(found.vocabulary, config, source)
        stacked["vocabulary"] = found.vocabulary
    return Checkpoint(config, stacked)


def _config_of(found: Found, published: Json, source: str) -> MedusaConfig:
    """Count heads, blocks and sizes from the tensors; take the rest from the config."""
    tensors = found.tensors
    parts = _parts(found, source)
    count = 1 + max(head for head, _, _ in parts)
    if count > len(tensors):  # an absurd index; refused before as many tensors are asked for
        raise RequestError(
            f"{source} names head {count - 1} but holds {len(tensors)} tensors; its heads are not complete"
        )
    layers = 1 + max((layer for _, layer, part in parts if part != "weight"), default=-1)
    block = "mlp" if any(part.startswith("up") for _, _, part in parts) else "square"
    first = tensors.get(f"0.0.{'up' if block == 'mlp' else 'linear'}.weight")
    if first is None or first.ndim != 2:
        raise RequestError(f"{source} misses the first head's first block; its heads are not complete")
    lm_head = tensors.get(f"0.{layers}.weight")
    known = {key: published[key] for key in OUR_KEYS if key in published}
    return MedusaConfig(
        **known
        | {
            "block": block,
            "expansion": first.shape[0] / first.shape[1] if block == "mlp" else 1.0,
            "lm_head": "own" if any(part == "weight" for _, _, part in parts) else "shared",
            "hidden_size": first.shape[1],
            "vocab_size": lm_head.shape[0] if lm_head is not None else published.get("vocab_size"),
            "num_heads": count,
            "num_layers": layers,
            "base_model_name_or_path": published.get("base_model_name_or_path"),
        }
    )


def _parts(found: Found, source: str) -> set[tuple[int, int, str]]:
    """Head, layer and part of every tensor; a tensor that cannot be a head's is an error."""
    for name, tensor in found.tensors.items():
        if tensor.ndim not in (1, 2) or not tensor.is_floating_point():
            raise RequestError(
                f"{source}: {found.called(name)} is {list(tensor.shape)} of {tensor.dtype}; heads are matrices and "
                "vectors of floats"
            )
    matches = {name: TENSOR_NAME.fullmatch(name) for name in found.tensors}
    unknown = sorted(name for name, match in matches.items() if match is None)
    if unknown or not matches:
        held = f"holds the tensor {found.called(unknown[0])}" if unknown else "holds no tensor"
        raise RequestError(f"{source} {held}; Medusa heads are named as in {found.called('0.0.linear.weight')}")
    return {(int(m["head"]), int(m["layer"]), m["part"]) for m in matches.values() if m is not None}


def _stacked(tensors: Tensors, config: MedusaConfig) -> Tensors:
    """The inverse of `to_published`."""

    def stack(name: str) -> Tensor:
        """[K, out, in] as [K, in, out]; biases [K, out] as [K, 1, out]."""
        stacked = torch.stack([tensors[f"{head}.{name}"] for head in range(config.num_heads)])
        return stacked.transpose(1, 2).contiguous() if stacked.ndim == 3 else stacked.unsqueeze(1)

    out = {
        f"blocks.{layer}.{ours}": stack(f"{layer}.{published}")
        for layer in range(config.num_layers)
        for ours, published in PARTS[config.block].items()
    }
    if config.lm_head == "own":
        out["lm_heads"] = stack(f"{config.num_layers}.weight")
    return out
