"""Code that export formats share: the input and output of an export, and a check of the heads."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.export.card import Facts

MODEL_WEIGHTS = "model.safetensors"
"""The file of weights that vLLM and SGLang load."""


@dataclass(frozen=True)
class Export:
    """The input of a function that writes an export format: the heads, their backbone and the folder to write into."""

    heads: Checkpoint
    """The heads, converted to the dtype to write."""
    backbone: str
    """The name or folder of the backbone, for the written config and for serving commands."""
    folder: Path
    """An empty temporary folder for the files. It is renamed to `place` after a successful export."""
    place: Path
    """The final folder, for serving commands."""
    lm_head: Callable[[], Tensor]
    """A function that returns the backbone's LM head [V, H]; it reads the files at its first call."""
    facts: Facts
    """Facts for the model card that are not part of the checkpoint, such as the licence."""


@dataclass(frozen=True)
class Written:
    """The result of an export: hints for the user, and the heads that reading the written files must return."""

    serve: str
    """The shell command or Python code that decodes with the written heads."""
    lost: str
    """One sentence on the features of this package that the other program does not have."""
    heads: Checkpoint
    """The heads that the loader must return for the written folder; the export command checks this."""
    notes: list[str] = field(default_factory=list)
    """Further hints for the user, one sentence each."""


def require_square(config: MedusaConfig, name: str, kinds: str = "heads.kind=medusa") -> None:
    """Check that the heads are independent and have square blocks (those of the Medusa paper), as the format requires.

    The error message names the format and, for heads of another kind, recommends the `heads.kind` settings `kinds`.
    Raise RequestError if the heads are of another kind, or have other blocks, prefix layers or a reduced vocabulary."""
    for is_wrong, found, way_out in (
        (config.kind != "medusa", f"kind {config.kind}", kinds),
        (config.prefix_layers, f"{config.prefix_layers} prefix layers", "heads.prefix_layers=0"),
        (config.vocabulary, f"a vocabulary of {config.vocabulary} tokens", "heads.vocabulary=0"),
        (config.block != "square", f"{config.block} blocks", "heads.block=square"),
    ):
        if is_wrong:
            raise RequestError(f"{name} cannot hold heads with {found}; train them with {way_out}")


def quoted(argument: str | Path) -> str:
    """Quote an argument of a shell command if needed."""
    return shlex.quote(str(argument))
