"""Forms of heads that others load: one file each, and one line here.

A format's `write` is given an `Export`, fills its folder and says what it wrote. It refuses what it cannot hold before
it reads or writes anything.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa.config import PUBLISHED_KEYS
from medusa.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from medusa.config import MedusaConfig
    from medusa.export.card import Facts
    from medusa.heads.independent import MedusaHeads

FORMATS = {
    "original-v1": "medusa.export.original:write",  # FasterDecoding's medusa_lm_head.pt
    "tgi": "medusa.export.tgi:write",  # Text Generation Inference, LoRAX
    "vllm": "medusa.export.vllm:write",  # vLLM: Medusa heads up to 0.32, EAGLE-3's layer
    "sglang": "medusa.checkpoints.eagle3:write_sglang",  # SGLang: EAGLE-3's layer
    "tensorrt-llm": "medusa.export.tensorrt_llm:write",  # heads beside the backbone
    "modelopt": "medusa.export.modelopt:write",  # heads and backbone in one folder, as TensorRT-LLM takes them
    "hub": "medusa.export.hub:write",  # plain transformers, through custom_generate
}


@dataclass(frozen=True)
class Export:
    """What a format is given."""

    heads: MedusaHeads
    """On the CPU, in the dtype to write them in."""
    source: Path
    """The folder that they came from, with their provenance and trees."""
    backbone: str
    """The backbone's name or folder, as configs and commands are to name it."""
    folder: Path
    """Empty, to be filled; becomes `place` when all is well."""
    place: Path
    """Where the result will lie, for the serving command."""
    lm_head: Callable[[], Tensor]
    """The backbone's LM head [V, H], read from its files at the first call."""
    facts: Facts | None = None
    """What a model card can say besides what the heads show themselves."""


@dataclass(frozen=True)
class Written:
    """What a format wrote."""

    serve: str
    """The command that serves it, or the lines of Python."""
    lost: str
    """What decoding loses there, in a sentence."""
    heads: MedusaHeads
    """What must come out when the folder is read again."""
    notes: list[str] = field(default_factory=list)
    """What else its user should know."""


def writer(name: str) -> Callable[[Export], Written]:
    """The `write` of a format.

    Raises:
        RequestError: no such format.
    """
    if name not in FORMATS:
        raise RequestError(f"--to is {name!r}; choose one of {', '.join(FORMATS)}")
    module, _, function = FORMATS[name].partition(":")
    found: Callable[[Export], Written] = getattr(import_module(module), function)
    return found


def require_square(config: MedusaConfig, name: str, kinds: str = "heads.kind=medusa") -> None:
    """Raises:
    RequestError: heads that no published form of Medusa heads can hold: they know independent square blocks. `kinds`:
        the way out where the kind is at fault."""
    for wrong, way_out in {
        f"kind {config.kind}": kinds if config.kind != "medusa" else None,
        f"{config.prefix_layers} prefix layers": "heads.prefix_layers=0" if config.prefix_layers else None,
        f"a vocabulary of {config.vocabulary} tokens": "heads.vocabulary=0" if config.vocabulary else None,
        f"{config.block} blocks": "heads.block=square" if config.block != "square" else None,
    }.items():
        if way_out:
            raise RequestError(f"{name} cannot hold heads with {wrong}; train them with {way_out}")


def published_config(config: MedusaConfig) -> dict[str, Any]:
    """The keys that FasterDecoding, TGI, LoRAX and TensorRT-LLM read, and no others."""
    return {theirs: getattr(config, ours) for ours, theirs in PUBLISHED_KEYS.items()}


def quoted(word: str | Path) -> str:
    """A word of a shell command."""
    return shlex.quote(str(word))


def sample_logits(heads: MedusaHeads) -> Tensor:
    """What `heads` say of a few random hidden states, paths and, where they share one, a random LM head: [K, 8, ...].

    The same for the same heads, to compare what was read with what was written.
    """
    import torch

    from medusa.heads.inputs import HeadInputs

    config = heads.config
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(heads.device, heads.dtype)

    hidden, rows = random(8, config.hidden_size), random(64, config.hidden_size)
    following = random(8, config.num_heads, config.hidden_size) if heads.follows_path else None
    with torch.no_grad():
        return heads(HeadInputs(hidden, following), lambda feature: feature @ rows.T)
