"""Conversion between this project's state dict of Medusa heads and the tensor names of other programs.

Other programs store matrices [out, in] and biases [out] for each head h and each of its L blocks l:

                    square block, weight [H, H] (H hidden size)    LM head of head h
    published       {h}.{l}.linear.weight, .bias                   {h}.{L}.weight
    vllm            blocks.{h}.layers.{l}.weight, .bias            lm_heads.{h}.weight, or one lm_head.weight for all
    tensorrt-llm    {h}.medusa_layers.{l}.linear.weight, .bias     {h}.lm_head.weight

The "published" names are those of FasterDecoding, TGI and LoRAX. This project adds names for MLP blocks, such as
{h}.{l}.up.weight. In a model with heads inside, the names begin with `medusa_head.` (FasterDecoding 1.0, MLC) or
`medusa_heads.` (modelopt, TensorRT-LLM). A file without LM heads belongs to heads that share the backbone's LM head.
Sizes are read from the tensors, because the configs of published heads are often wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from medusa.checkpoints.checkpoint import (
    Checkpoint,
    Tensors,
    empty,
    require_exactly,
    require_plausible,
    require_unquantised,
)
from medusa.checkpoints.stored import Form
from medusa.config import MedusaConfig, our_keys
from medusa.errors import RequestError
from medusa.files import Json

PARTS = {  # the parameters of each type of block, with their published names
    "square": {"weight": "linear.weight", "bias": "linear.bias"},
    "mlp": {"up": "up.weight", "up_bias": "up.bias", "down": "down.weight", "down_bias": "down.bias"},
}
TENSOR_NAME = re.compile(r"(?P<head>\d+)\.(?P<layer>\d+)\.(?P<part>(?:linear\.|up\.|down\.)?(?:weight|bias))")
LM_HEAD_NAME = re.compile(r"\d+\.\d+\.weight")
PREFIX = re.compile(r"medusa_heads?\.")  # of the names of heads inside a model
SHARED, TOKEN_MAP = "lm_head.weight", "token_map"  # vLLM's shared LM head, and ids of a reduced vocabulary


@dataclass(frozen=True)
class Names:
    """Patterns of the tensors' names in one file format, for head h, block l and the part `weight` or `bias`."""

    block: str
    lm_head: str

    def block_of(self, name: str) -> re.Match[str] | None:
        """Match the name of a block's tensor; groups: h (head), l (block), part. `None` for other tensors."""
        return re.fullmatch(_regex(self.block), name)

    def renamed(self, name: str, to: Names, num_layers: int = 0) -> str:
        """Convert a tensor's name to its name in the format `to`; return unknown names unchanged.

        FasterDecoding's LM head names contain the number of blocks per head: `num_layers`, if `name` lacks it."""
        for pattern, other in ((self.block, to.block), (self.lm_head, to.lm_head)):
            if match := re.fullmatch(_regex(pattern), name):
                return other.format(**{"L": num_layers} | match.groupdict())
        return name


def _regex(pattern: str) -> str:
    """Turn a pattern such as `{h}.{l}.linear.{part}` into a regular expression that matches tensors' names."""
    groups = {"h": r"(?P<h>\d+)", "l": r"(?P<l>\d+)", "L": r"(?P<L>\d+)", "part": "(?P<part>weight|bias)"}
    return re.sub(r"\\{(\w+)\\}", lambda match: groups[match[1]], re.escape(pattern))


PUBLISHED = Names("{h}.{l}.linear.{part}", "{h}.{L}.weight")
VLLM = Names("blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight")
TENSORRT_LLM = Names("{h}.medusa_layers.{l}.linear.{part}", "{h}.lm_head.weight")


def are_heads(names: Iterable[str]) -> bool:
    """Whether one of these tensors belongs to a block of Medusa heads in any file format of this module."""
    bare = [PREFIX.sub("", name, count=1) for name in names]
    return any(form.block_of(name) for name in bare for form in (PUBLISHED, VLLM, TENSORRT_LLM))


@dataclass
class HeadTensors:
    """The tensors of heads by FasterDecoding's names. Names in the file: `prefix` + the name in the format `names`.

    `vocabulary` [N] holds the ids of the tokens that the heads guess among; `None`: all tokens."""

    tensors: Tensors
    names: Names = PUBLISHED
    prefix: str = ""
    vocabulary: Tensor | None = None

    def called(self, published: str) -> str:
        """Convert FasterDecoding's name of a tensor to the tensor's name in the file."""
        return self.prefix + PUBLISHED.renamed(published, self.names)


def _complete_vllm(found: HeadTensors, num_layers: int, published: Json, source: str) -> None:
    """Fill in what vLLM's files can leave out: each head gets the shared LM head, if there is one, and biases of zero.

    If the vocabulary is reduced, LM heads with rows for all tokens are cut to the rows of its tokens."""
    tensors = found.tensors
    blocks = [match for match in map(PUBLISHED.block_of, tensors) if match]
    shared, own = tensors.pop(SHARED, None), [name for name in tensors if LM_HEAD_NAME.fullmatch(name)]
    if published.get("original_lm_head") and shared is None and own == [f"0.{num_layers}.weight"]:
        shared = tensors.pop(own.pop())  # vLLM uses the LM head of head 0 for all heads
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
        raise RequestError(f"{source}: {TOKEN_MAP} is {list(tokens.shape)} of {tokens.dtype}; it must be a list of ids")
    found.vocabulary = tokens.to(torch.int64)
    for name, tensor in tensors.items():
        if LM_HEAD_NAME.fullmatch(name) and len(tensor) > len(tokens):
            if tokens.min() < 0 or tokens.max() >= len(tensor):
                wrong = f"{TOKEN_MAP} names tokens from {tokens.min()} to {tokens.max()}"
                raise RequestError(f"{source}: {wrong}; they must be at least 0 and below {len(tensor)}")
            tensors[name] = tensor[found.vocabulary]


def _names(config: MedusaConfig) -> dict[str, str]:
    """Map names in our state dict to FasterDecoding's without `{h}.`: `blocks.0.weight` becomes `0.linear.weight`."""
    layers, parts = range(config.num_layers), PARTS[config.block].items()
    names = {f"blocks.{layer}.{parameter}": f"{layer}.{part}" for layer in layers for parameter, part in parts}
    return names | ({"lm_heads": f"{config.num_layers}.weight"} if config.lm_head == "own" else {})


def to_published(checkpoint: Checkpoint) -> Tensors:
    """Return the tensors of heads under FasterDecoding's names; unchanged for heads without such names."""
    config, tensors = checkpoint.config, checkpoint.tensors
    if not config.is_published:
        return tensors
    out = {}
    for head in range(config.num_heads):
        for module, name in _names(config).items():
            part = tensors[module][head]  # a matrix [in, out] or a bias [1, out]
            out[f"{head}.{name}"] = part[0] if name.endswith("bias") else part.T
    return out


def from_published(found: HeadTensors, published: Json, source: str) -> Checkpoint:
    """Make heads from their tensors and `published`, the content of `config.json`.

    Raise RequestError if a tensor is wrong or missing. The message begins with `source`, the name of the file."""
    config = _config_of(found, published, source)
    require_exactly(found.tensors, to_published(empty(config)), source, found.called)
    stacked = {}
    for module, name in _names(config).items():
        of_heads = torch.stack([found.tensors[f"{head}.{name}"] for head in range(config.num_heads)])
        # Matrices [K, out, in] become [K, in, out], and biases [K, out] become [K, 1, out].
        stacked[module] = of_heads.unsqueeze(1) if name.endswith("bias") else of_heads.transpose(1, 2).contiguous()
    if found.vocabulary is not None:
        vocab_size = published.get("vocab_size") or 1 + int(found.vocabulary.max())
        config = replace(config, vocabulary=len(found.vocabulary), vocab_size=vocab_size)
        stacked["vocabulary"] = found.vocabulary
    return Checkpoint(config, stacked).require_complete(source)


def from_others(stored: Mapping[str, Tensor], published: Json, source: str, asked: str) -> Checkpoint:
    """Make heads from the tensors `stored` by another program: only heads, or a model with heads inside.

    `published` is their `config.json`, and `source` their file, for messages. If a model holds the heads, it becomes
    their backbone, under the name `asked`: the folder or Hub id that the user gave. Raise RequestError if the heads
    are quantised, scale their logits, or have a wrong tensor or lack one."""
    of_vllm = published.get("model_type") == "medusa" or any(map(VLLM.block_of, stored))
    prefix = next((match[0] for match in map(PREFIX.match, stored) if match), "")
    # Tensors without the prefix belong to the backbone, except in vLLM's files, where names with and without it mix.
    inside = {name.removeprefix(prefix): name for name in stored if of_vllm or name.startswith(prefix)}
    require_unquantised({name: stored[name] for name in inside.values()}, source, inside.values())
    names = next((names for names in (VLLM, TENSORRT_LLM) if any(map(names.block_of, inside))), PUBLISHED)
    layers = 1 + max((int(match["l"]) for match in map(names.block_of, inside) if match), default=-1)
    # Unknown names stay as they are, so that `from_published` rejects them.
    tensors = {names.renamed(name, PUBLISHED, layers): stored[in_file] for name, in_file in inside.items()}
    found = HeadTensors(tensors, names, prefix, tensors.pop(TOKEN_MAP, None) if of_vllm else None)
    require_plausible({in_file: stored[in_file] for in_file in inside.values()}, source, block=layers)
    if of_vllm:
        _complete_vllm(found, layers, published, source)
    if names is not PUBLISHED or prefix:  # other keys of another program's config can have other meanings
        published = {key: published[key] for key in ("base_model_name_or_path", "vocab_size") if key in published}
    if prefix and len(tensors) < len(stored):  # the heads are inside their backbone
        published["base_model_name_or_path"] = asked
    return from_published(found, published, source)


def _config_of(found: HeadTensors, published: Json, source: str) -> MedusaConfig:
    """Make the heads' config: sizes from the tensors, and other values from `published`, the `config.json`."""
    tensors = found.tensors
    for name, tensor in tensors.items():
        if tensor.ndim not in (1, 2) or not tensor.is_floating_point():
            held = f"{found.called(name)} is {list(tensor.shape)} of {tensor.dtype}"
            raise RequestError(f"{source}: {held}; heads are matrices and vectors of floats")
    matches = {name: TENSOR_NAME.fullmatch(name) for name in tensors}
    unknown = sorted(name for name, match in matches.items() if match is None)
    if unknown or not matches:
        held = f"holds the tensor {found.called(unknown[0])}" if unknown else "holds no tensor"
        raise RequestError(f"{source} {held}; Medusa heads are named as in {found.called('0.0.linear.weight')}")
    parts = {(int(m["head"]), int(m["layer"]), m["part"]) for m in matches.values() if m is not None}
    count = 1 + max(head for head, _, _ in parts)
    layers = 1 + max((layer for _, layer, part in parts if part != "weight"), default=-1)
    require_plausible(tensors, source, head=count, block=layers)
    block = "mlp" if any(part.startswith("up") for _, _, part in parts) else "square"
    first = tensors.get(f"0.0.{'up' if block == 'mlp' else 'linear'}.weight")
    if first is None or first.ndim != 2:
        raise RequestError(f"{source} misses the first head's first block; its heads are not complete")
    lm_head = tensors.get(f"0.{layers}.weight")
    known = our_keys(published)
    known |= {"block": block, "hidden_size": first.shape[1], "num_heads": count, "num_layers": layers}
    known["expansion"] = first.shape[0] / first.shape[1] if block == "mlp" else 1.0
    known["lm_head"] = "own" if any(part == "weight" for _, _, part in parts) else "shared"
    known["vocab_size"] = lm_head.shape[0] if lm_head is not None else published.get("vocab_size")
    known["base_model_name_or_path"] = published.get("base_model_name_or_path")
    return MedusaConfig(**known)


FORM = Form(are_heads, from_others)
