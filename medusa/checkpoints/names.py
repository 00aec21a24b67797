"""What others call the tensors of Medusa heads: the same ones under other names, read here and written by the formats.

                        block l of head h                              its LM head
    published           {h}.{l}.linear.weight  .bias                   {h}.{L}.weight
    vllm                blocks.{h}.layers.{l}.weight  .bias            lm_heads.{h}.weight, or one lm_head.weight
    tensorrt-llm        {h}.medusa_layers.{l}.linear.weight  .bias     {h}.lm_head.weight

`medusa_head.` stands before them in models with heads inside (FasterDecoding 1.0, MLC), `medusa_heads.` in those of
modelopt and TensorRT-LLM.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa.errors import RequestError

PREFIX = re.compile(r"medusa_heads?\.")
PUBLISHED_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
PUBLISHED_LM_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")


@dataclass(frozen=True)
class Names:
    """One way to call them: patterns of h, l and the part, without a prefix."""

    block: str
    lm_head: str

    def called(self, published: str) -> str:
        """What a tensor of this published name is called here."""
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
SHARED, WORDS = "lm_head.weight", "token_map"  # vLLM's, beside the heads


def is_inside_a_model(name: str) -> bool:
    """Whether this is a tensor of heads that may lie in a model's files."""
    return PREFIX.match(name) is not None


def is_of_heads(name: str) -> bool:
    """Whether a block of heads is called this by anyone."""
    bare = PREFIX.sub("", name, count=1)
    return any(names.block_of(bare) for names in (PUBLISHED, *OTHERS))


@dataclass
class Found:
    """Tensors of heads under the published names."""

    tensors: dict[str, Tensor]
    names: Names
    prefix: str
    words: Tensor | None = None
    """[N] the tokens that the heads guess among, where that is not all of them."""

    def called(self, published: str) -> str:
        """What the file calls a tensor: for messages."""
        return self.prefix + self.names.called(published)


def find(stored: Mapping[str, Tensor], published: Mapping[str, Any], source: str) -> Found:
    """The tensors of heads among those `stored`, whoever named them; `published` is the config beside them.

    What stands under no name of heads is left as it is, to be refused by whoever reads them.

    Raises:
        RequestError: heads that are quantised, scaled, or whose own vocabulary does not fit.
    """
    of_vllm = published.get("model_type") == "medusa" or any(map(VLLM.block_of, stored))
    prefix = next((match[0] for match in map(PREFIX.match, stored) if match), "")
    # Beside prefixed ones stand a backbone's tensors, but in a file of vLLM's, which takes the prefix off.
    inside = {name.removeprefix(prefix): name for name in stored if of_vllm or name.startswith(prefix)}
    if scale := next((name for name in inside if name.endswith(("_scale", "_scaling_factor", "_amax"))), None):
        raise RequestError(f"{source} holds {prefix}{scale}: quantised heads cannot be read; take those before")
    names = next((names for names in OTHERS if any(map(names.block_of, inside))), PUBLISHED)
    found, shared = Found({}, names, prefix), None
    own: dict[str, Tensor] = {}
    for name, theirs in inside.items():
        if of_vllm and name == WORDS:
            found.words = stored[theirs]
        elif of_vllm and name == SHARED:
            shared = stored[theirs]
        elif match := names.block_of(name):
            found.tensors[PUBLISHED.block.format(**match.groupdict())] = stored[theirs]
        elif names is not PUBLISHED and (match := names.lm_head_of(name)):
            own[match["h"]] = stored[theirs]
        else:
            found.tensors[name] = stored[theirs]
    blocks = [match for match in map(PUBLISHED_BLOCK.fullmatch, found.tensors) if match]
    layers = 1 + max((int(match[2]) for match in blocks), default=-1)
    if published.get("original_lm_head") and shared is None and set(own) == {"0"}:  # which it takes for all heads
        shared = own.pop("0")
    if shared is not None and own:
        raise RequestError(f"{source} holds {SHARED} beside LM heads of the heads' own; remove one of them")
    if shared is not None:
        own = {match[1]: shared for match in blocks}
    found.tensors |= {PUBLISHED.lm_head.format(h=head, L=layers): weight for head, weight in own.items()}
    if not of_vllm:
        return found
    if not published.get("medusa_fc_bias") and not any(match[3] == "bias" for match in blocks):
        for match in blocks:
            weight = found.tensors[match[0]]
            found.tensors[f"{match[1]}.{match[2]}.linear.bias"] = weight.new_zeros(len(weight))
    return _of_words(found, published, source)


def _of_words(found: Found, published: Mapping[str, Any], source: str) -> Found:
    """LM heads of vLLM's that know some tokens only: the rows of those, in the order of its `token_map`."""
    if (scale := published.get("logit_scale", 1.0)) != 1.0:
        raise RequestError(f"{source}: its logits are scaled by {scale}; only heads with logit_scale 1 can be read")
    if found.words is None:
        return found
    words = found.words
    if words.ndim != 1 or words.is_floating_point() or words.is_complex():
        raise RequestError(f"{source}: {WORDS} is {list(words.shape)} of {words.dtype}; it must be a list of token ids")
    found.words = words.to(torch.int64)
    for name, tensor in found.tensors.items():
        if PUBLISHED_LM_HEAD.fullmatch(name) and len(tensor) > len(words) and words.max() < len(tensor):
            found.tensors[name] = tensor[found.words]
    return found
