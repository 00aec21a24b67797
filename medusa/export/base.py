"""The input and output of every format, and what formats of Medusa heads share."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.config import PUBLISHED_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json

if TYPE_CHECKING:
    from medusa.export.facts import Facts


@dataclass(frozen=True)
class Export:
    """The input of a format."""

    heads: Checkpoint
    """The heads in the dtype to write."""
    backbone: str
    """The backbone's name or folder, for configs and commands."""
    folder: Path
    """An empty folder to fill; it becomes `place` on success."""
    place: Path
    """The folder of the result, for the serving command."""
    lm_head: Callable[[], Tensor]
    """Reads the backbone's LM head [V, H] from its files, at the first call."""
    facts: Facts | None = None
    """Facts for a model card that the heads themselves do not hold."""


@dataclass(frozen=True)
class Written:
    """The output of a format."""

    serve: str
    """The command that serves the result, or the lines of Python."""
    lost: str
    """What decoding there lacks, in a sentence."""
    heads: Checkpoint
    """The heads that reading the folder again must give."""
    notes: list[str] = field(default_factory=list)
    """Other hints for the user."""


def require_square(config: MedusaConfig, name: str, kinds: str = "heads.kind=medusa") -> None:
    """Raise RequestError unless the heads are independent ones of square blocks, as the format `name` needs them.

    `kinds`: the way out if the kind is wrong.
    """
    for wrong, way_out in {
        f"kind {config.kind}": kinds if config.kind != "medusa" else None,
        f"{config.prefix_layers} prefix layers": "heads.prefix_layers=0" if config.prefix_layers else None,
        f"a vocabulary of {config.vocabulary} tokens": "heads.vocabulary=0" if config.vocabulary else None,
        f"{config.block} blocks": "heads.block=square" if config.block != "square" else None,
    }.items():
        if way_out:
            raise RequestError(f"{name} cannot hold heads with {wrong}; train them with {way_out}")


def published_config(config: MedusaConfig) -> Json:
    """The keys that FasterDecoding, TGI, LoRAX and TensorRT-LLM read, and no others."""
    return {published: getattr(config, ours) for ours, published in PUBLISHED_KEYS.items()}


def quoted(argument: str | Path) -> str:
    """An argument of a shell command, quoted if needed."""
    return shlex.quote(str(argument))
