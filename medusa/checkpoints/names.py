"""Names that other programs give to the tensors of Medusa heads.

                        block l of head h                              its LM head
    published           {h}.{l}.linear.weight  .bias                   {h}.{L}.weight
    vllm                blocks.{h}.layers.{l}.weight  .bias            lm_heads.{h}.weight, or one lm_head.weight
    tensorrt-llm        {h}.medusa_layers.{l}.linear.weight  .bias     {h}.lm_head.weight

Models with heads inside put a prefix before them: `medusa_head.` (FasterDecoding 1.0, MLC) or `medusa_heads.` (modelopt
and TensorRT-LLM).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa.errors import RequestError
from medusa.files import Json

PREFIX = re.compile(r"medusa_heads?\.")
PUBLISHED_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
PUBLISHED_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
QUANTISED = ("_scale", "_scaling_factor", "_amax")


@dataclass(frozen=True)
class Names:
    """The names in one format: patterns of h, l and the part, without a prefix."""

    block: str
    lm_head: str

    def called(self, published: str) -> str:
        """The name in this format of the tensor with a published name."""
        if match := PUBLISHED_BLOCK.fullmatch(published):
            return self.block.format(h=match[1], l=match[2], part=match[3])
        if match := PUBLISHED_LM_HEAD.fullmatch(published):
            return self.lm_head.format(h=match[1], L=match[2])
        return published

    def block_of(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(_pattern(self.block), name)

    def lm_head_of(self, name: str) -> re.Match[str] | None:
        return re.fullmatch(_pattern(self.lm_head), name)


def _pattern(template: str) -> str:
    groups = {"h": r"(?P<h>\d+)", "l": r"(?P<l>\d+)", "L": r"\d+", "part": "(?P<part>weight|bias)"}
    return re.sub(r"\\{(\w+)\\}", lambda match: groups[match[1]], re.escape(template))


PUBLISHED = Names("{h}.{l}.linear.{part}", "{h}.{L}.weight")
VLLM = Names("blocks.{h}.layers.{l}.{part}", "lm_heads.{h}.weight")
TENSORRT_LLM = Names("{h}.medusa_layers.{l}.linear.{part}", "{h}.lm_head.weight")
OTHERS = (VLLM, TENSORRT_LLM)
SHARED, TOKEN_MAP = "lm_head.weight", "token_map"
"""vLLM's names of an LM head for all heads, and of the tokens that heads guess among."""


def is_inside_a_model(name: str) -> bool:
    """Whether the name has the prefix of heads inside a model."""
    return PREFIX.match(name) is not None


def is_of_heads(name: str) -> bool:
    """Whether the name is that of a heads' block in any format."""
    bare = PREFIX.sub("", name, count=1)
    return any(names.block_of(bare) for names in (PUBLISHED, *OTHERS))


@dataclass
class Found:
    """Tensors of heads under the published names."""

    tensors: dict[str, Tensor]
    names: Names = PUBLISHED
    """The format of the file."""
    prefix: str = ""
    vocabulary: Tensor | None = None
    """[N] the tokens that the heads guess among; `None`: all."""

    def called(self, published: str) -> str:
        """The name in the file of the tensor with a published name."""
        return self.prefix + self.names.called(published)


def find(stored: Mapping[str, Tensor], published: Json, source: str) -> Found:
    """Find the tensors of heads among those `stored`; `published` is the config of the same folder.

    A tensor whose name belongs to no heads keeps its name, so that the reader of heads refuses it.

    Raises:
        RequestError: heads that are quantised or scaled, or a vocabulary of their own that does not fit.
    """
    of_vllm = published.get("model_type") == "medusa" or any(map(VLLM.block_of, stored))
    prefix = next((match[0] for match in map(PREFIX.match, stored) if match), "")
    # Tensors without the prefix are the backbone's. In vLLM's files they are the heads', since vLLM drops the prefix.
    inside = {name.removeprefix(prefix): name for name in stored if of_vllm or name.startswith(prefix)}
    if scale := next((name for name in inside if name.endswith(QUANTISED)), None):
        raise RequestError(
            f"{source} holds {prefix}{scale}: these weights are quantised; use the unquantised checkpoint"
        )
    found = Found({}, next((names for names in OTHERS if any(map(names.block_of, inside))), PUBLISHED), prefix)
    shared: Tensor | None = None
    own: dict[str, Tensor] = {}
    for name, in_file in inside.items():
        if of_vllm and name == TOKEN_MAP:
            found.vocabulary = stored[in_file]
        elif of_vllm and name == SHARED:
            shared = stored[in_file]
        elif match := found.names.block_of(name):
            found.tensors[PUBLISHED.block.format(**match.groupdict())] = stored[in_file]
        elif found.names is not PUBLISHED and (match := found.names.lm_head_of(name)):
            own[match["h"]] = stored[in_file]
        else:
            found.tensors[name] = stored[in_file]
    if published.get("original_lm_head") and shared is None and set(own) == {"0"}:  # vLLM uses it for all heads
        shared = own.pop("0")
    if shared is not None and own:
        raise RequestError(f"{source} holds both {SHARED} and LM heads of the heads' own; remove one of them")
    _add_lm_heads(found, own, shared)
    if of_vllm:
        _complete_vllm(found, published, source)
    return found


def _blocks(found: Found) -> list[re.Match[str]]:
    return [match for match in map(PUBLISHED_BLOCK.fullmatch, found.tensors) if match]


def _add_lm_heads(found: Found, own: dict[str, Tensor], shared: Tensor | None) -> None:
    """Add the heads' LM heads under the published names; a shared one is added for every head."""
    blocks = _blocks(found)
    layers = 1 + max((int(match[2]) for match in blocks), default=-1)
    if shared is not None:
        own = {match[1]: shared for match in blocks}
    found.tensors |= {PUBLISHED.lm_head.format(h=head, L=layers): weight for head, weight in own.items()}


def _complete_vllm(found: Found, published: Json, source: str) -> None:
    """Add biases of zero if vLLM's file has none; of its LM heads keep the rows of the tokens in `token_map`."""
    blocks = _blocks(found)
    if not published.get("medusa_fc_bias") and not any(match[3] == "bias" for match in blocks):
        for match in blocks:
            weight = found.tensors[match[0]]
            found.tensors[f"{match[1]}.{match[2]}.linear.bias"] = weight.new_zeros(len(weight))
    if (scale := published.get("logit_scale", 1.0)) != 1.0:
        raise RequestError(f"{source}: its logits are scaled by {scale}; only heads with logit_scale 1 can be read")
    if found.vocabulary is None:
        return
    tokens = found.vocabulary
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
        shape = list(tokens.shape)
        raise RequestError(f"{source}: {TOKEN_MAP} is {shape} of {tokens.dtype}; it must be a list of token ids")
    found.vocabulary = tokens.to(torch.int64)
    for name, tensor in found.tensors.items():
        if PUBLISHED_LM_HEAD.fullmatch(name) and len(tensor) > len(tokens) and tokens.max() < len(tensor):
            found.tensors[name] = tensor[found.vocabulary]
