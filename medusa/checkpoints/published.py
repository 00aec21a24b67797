"""Medusa heads as other programs store them: matrices [out, in] and biases [out] of each head h and block l of L.

                    square block                                   LM head of a head
    published       {h}.{l}.linear.weight  .bias                   {h}.{L}.weight
    vllm            blocks.{h}.layers.{l}.weight  .bias            lm_heads.{h}.weight, or one lm_head.weight
    tensorrt-llm    {h}.medusa_layers.{l}.linear.weight  .bias     {h}.lm_head.weight

FasterDecoding, TGI and LoRAX read the published names; MLP blocks extend them by {h}.{l}.up.weight  .up.bias
.down.weight  .down.bias. Models with heads inside put a prefix before them: `medusa_head.` (FasterDecoding 1.0, MLC) or
`medusa_heads.` (modelopt and TensorRT-LLM). Without LM heads, heads share the backbone's. Sizes are read from the
tensors, because published configs say 2 heads where the file holds 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_plausible
from medusa.config import OUR_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json

PARTS = {
    "square": {"weight": "linear.weight", "bias": "linear.bias"},
    "mlp": {"up": "up.weight", "up_bias": "up.bias", "down": "down.weight", "down_bias": "down.bias"},
}
"""The parameters of each kind of block, and the published names of their tensors."""
TENSOR_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<part>(?:linear\.|up\.|down\.)?(?:weight|bias))")
LM_HEAD_NAME = re.compile(r"\d+\.\d+\.weight")
PREFIX = re.compile(r"medusa_heads?\.")
"""The prefix of heads inside a model."""
QUANTISED = ("_scale", "_scaling_factor", "_amax")
"""Ends of the names of tensors that only quantised heads have."""
SHARED, TOKEN_MAP = "lm_head.weight", "token_map"
"""vLLM's names of an LM head for all heads, and of the tokens that heads guess among."""


@dataclass(frozen=True)
class Names:
    """The names in one format: patterns of h, l and the part, without a prefix."""

    block: str
    lm_head: str

    def called(self, published: str) -> str:
        """The name in this format of the tensor with a published name."""
        match = TENSOR_NAME.fullmatch(published)
        if match is None or match["part"] not in ("weight", "linear.weight", "linear.bias"):
            return published
        pattern = self.lm_head if match["part"] == "weight" else self.block
        return pattern.format(h=match["head"], l=match["layer"], L=match["layer"], part=match["part"].split(".")[-1])

    def block_of(self, name: str) -> re.Match[str] | None:
        """The match of a block's name, with groups h, l and part; `None` for other names."""
        return re.fullmatch(_regex(self.block), name)

    def to_published(self, name: str, num_layers: int) -> str:
        """The published name of a tensor with a name in this format; other names stay."""
        if match := self.block_of(name):
            return PUBLISHED.block.format(**match.groupdict())
        match = None if self is PUBLISHED else re.fullmatch(_regex(self.lm_head), name)
        return PUBLISHED.lm_head.format(h=match["h"], L=num_layers) if match else name


def _regex(pattern: str) -> str:
    groups = {"h": r"(?P<h>\d+)", "l": r"(?P<l>\d+)", "L": r"\d+", "part": "(?P<part>weight|bias)"}
    return re.sub(r"\\{(\w+)\\}", lambda match: groups[match[1]], re.escape(pattern))


PUBLISHED = Names("{h}.{l}.linear.{part}", "{h}.{L}.weight")
VLLM = Names("blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight")
TENSORRT_LLM = Names("{h}.medusa_layers.{l}.linear.{part}", "{h}.lm_head.weight")


def is_of_heads(name: str) -> bool:
    """Whether the name is that of a heads' block in any format."""
    bare = PREFIX.sub("", name, count=1)
    return any(names.block_of(bare) for names in (PUBLISHED, VLLM, TENSORRT_LLM))


@dataclass
class HeadTensors:
    """Tensors of heads under the published names."""

    tensors: Tensors
    names: Names = PUBLISHED
    """The format of the file."""
    prefix: str = ""
    """The prefix of all names in the file."""
    vocabulary: Tensor | None = None
    """[N] the tokens that the heads guess among; `None`: all."""

    def called(self, published: str) -> str:
        """The name in the file of the tensor with a published name."""
        return self.prefix + self.names.called(published)


def _find_heads(stored: Mapping[str, Tensor], published: Json, source: str) -> HeadTensors:
    """Find the tensors of heads among those `stored`; `published` is the config of the same folder.

    A tensor whose name belongs to no head keeps its name, so that `from_published` rejects it.

    Raises:
        RequestError: heads that are quantised or scaled, or a draft vocabulary that does not fit.
    """
    of_vllm = published.get("model_type") == "medusa" or any(map(VLLM.block_of, stored))
    prefix = next((match[0] for match in map(PREFIX.match, stored) if match), "")
    # Tensors without the prefix are the backbone's. In vLLM's files they are the heads', since vLLM drops the prefix.
    inside = {name.removeprefix(prefix): name for name in stored if of_vllm or name.startswith(prefix)}
    if scale := next((name for name in inside if name.endswith(QUANTISED)), None):
        raise RequestError(
            f"{source} holds {prefix}{scale}: these weights are quantised; use the unquantised checkpoint"
        )
    names = next((names for names in (VLLM, TENSORRT_LLM) if any(map(names.block_of, inside))), PUBLISHED)
    layers = 1 + max((int(match["l"]) for match in map(names.block_of, inside) if match), default=-1)
    tensors = {names.to_published(name, layers): stored[in_file] for name, in_file in inside.items()}
    found = HeadTensors(tensors, names, prefix)
    if of_vllm:
        found.vocabulary = tensors.pop(TOKEN_MAP, None)
        _complete_vllm(found, layers, published, source)
    return found


def _complete_vllm(found: HeadTensors, num_layers: int, published: Json, source: str) -> None:
    """Complete heads of vLLM's file: an LM head for each, cut to the tokens in `token_map`, and biases of 0."""
    tensors = found.tensors
    blocks = [match for match in map(PUBLISHED.block_of, tensors) if match]
    shared, own = tensors.pop(SHARED, None), [name for name in tensors if LM_HEAD_NAME.fullmatch(name)]
    if published.get("original_lm_head") and shared is None and own == [f"0.{num_layers}.weight"]:
        shared = tensors.pop(own.pop())  # vLLM uses it for all heads
    if shared is not None and own:
        raise RequestError(f"{source} holds both {SHARED} and an LM head for each head; remove one of them")
    if shared is not None:
        tensors |= {f"{match['h']}.{num_layers}.weight": shared for match in blocks}
    if not published.get("medusa_fc_bias") and not any(match["part"] == "bias" for match in blocks):
        for match in blocks:
            tensors[f"{match['h']}.{match['l']}.linear.bias"] = tensors[match[0]].new_zeros(len(tensors[match[0]]))
    if (scale := published.get("logit_scale", 1.0)) != 1.0:
        raise RequestError(f"{source}: its logits are scaled by {scale}; only heads with logit_scale 1 can be read")
    if (tokens := found.vocabulary) is None:
        return
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
        shape = list(tokens.shape)
        raise RequestError(f"{source}: {TOKEN_MAP} is {shape} of {tokens.dtype}; it must be a list of token ids")
    found.vocabulary = tokens.to(torch.int64)
    for name, tensor in tensors.items():
        if LM_HEAD_NAME.fullmatch(name) and len(tensor) > len(tokens):
            if tokens.max() >= len(tensor):
                raise RequestError(f"{source}: {TOKEN_MAP} names token {tokens.max()} of {len(tensor)}; remove it")
            tensors[name] = tensor[found.vocabulary]


def to_published(checkpoint: Checkpoint) -> Tensors:
    """The tensors of each head under published names; heads without a published form keep their modules' names."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not config.is_published:
        return tensors
    out = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            for parameter, published in PARTS[config.block].items():
                stacked = tensors[f"blocks.{layer}.{parameter}"][head]  # matrices [in, out], biases [1, out]
                out[f"{head}.{layer}.{published}"] = stacked[0] if "bias" in published else stacked.T
        if config.lm_head == "own":
            out[f"{head}.{config.num_layers}.weight"] = tensors["lm_heads"][head].T
    return out


def from_published(found: HeadTensors, published: Json, source: str) -> Checkpoint:
    """Heads from tensors with published names, and the config `published` that came with them.

    Raises:
        RequestError: a tensor of the file `source` is missing, unknown or of the wrong shape.
    """
    config = _config_of(found, published, source)
    require_exactly(found.tensors, to_published(empty(config)), source, found.called)
    stacked = _stacked(found.tensors, config)
    if found.vocabulary is not None:
        vocab_size = published.get("vocab_size") or 1 + int(found.vocabulary.max())
        config = replace(config, vocabulary=len(found.vocabulary), vocab_size=vocab_size)
        stacked["vocabulary"] = found.vocabulary
    return Checkpoint(config, stacked).require_complete(source)


def from_others(stored: Mapping[str, Tensor], published: Json, source: str, asked: str) -> Checkpoint:
    """Heads under other programs' names, alone or inside the model `asked`; `published` is the folder's config."""
    found = _find_heads(stored, published, source)
    if found.names is not PUBLISHED or found.prefix:  # another program's config: its other keys can mean other things
        published = {key: published[key] for key in ("base_model_name_or_path", "vocab_size") if key in published}
    if found.prefix and len(found.tensors) < len(stored):  # inside the backbone that they belong to
        published["base_model_name_or_path"] = asked
    return from_published(found, published, source)


def _config_of(found: HeadTensors, published: Json, source: str) -> MedusaConfig:
    """Count heads, blocks and sizes from the tensors; take the rest from the config."""
    tensors = found.tensors
    parts = _parts(found, source)
    count = 1 + max(head for head, _, _ in parts)
    require_plausible(count, tensors, source)
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


def _parts(found: HeadTensors, source: str) -> set[tuple[int, int, str]]:
    """Head, layer and part of every tensor; raise RequestError for a tensor that cannot be a head's."""
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
    """Stack the tensors of all heads by our modules' names: the inverse of `to_published`."""

    def stack(name: str) -> Tensor:
        """[K, out, in] as [K, in, out]; biases [K, out] as [K, 1, out]."""
        stacked = torch.stack([tensors[f"{head}.{name}"] for head in range(config.num_heads)])
        return stacked.transpose(1, 2).contiguous() if stacked.ndim == 3 else stacked.unsqueeze(1)

    out = {
        f"blocks.{layer}.{parameter}": stack(f"{layer}.{published}")
        for layer in range(config.num_layers)
        for parameter, published in PARTS[config.block].items()
    }
    if config.lm_head == "own":
        out["lm_heads"] = stack(f"{config.num_layers}.weight")
    return out
