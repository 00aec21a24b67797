"""Code that several export formats share: input and output types, checks, and files with FasterDecoding's names."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, WEIGHTS, save_tensors
from medusa.config import PUBLISHED_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.export.card import Facts
from medusa.files import write_json
from medusa.tree import Tree, named_trees

MODEL_WEIGHTS = "model.safetensors"
"""The file of weights that vLLM and SGLang load."""
CHOICES, MAX_CHOICES = "medusa_choices.json", 63
"""The file of the tree for TensorRT-LLM, and the largest number of nodes without the root that its engine allows."""
FALLBACK_TREE = "mc_sim_7b_63"
"""The name of the tree that is written for heads without a tree of their own."""


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

    Args:
        config: the config of the heads.
        name: the format's name, for the error message.
        kinds: the `heads.kind` setting that the error message recommends for heads of another kind.

    Raises:
        RequestError: the heads are of another kind, or have other blocks, prefix layers or a reduced vocabulary.
    """
    for wrong, way_out in {
        f"kind {config.kind}": kinds if config.kind != "medusa" else None,
        f"{config.prefix_layers} prefix layers": "heads.prefix_layers=0" if config.prefix_layers else None,
        f"a vocabulary of {config.vocabulary} tokens": "heads.vocabulary=0" if config.vocabulary else None,
        f"{config.block} blocks": "heads.block=square" if config.block != "square" else None,
    }.items():
        if way_out:
            raise RequestError(f"{name} cannot hold heads with {wrong}; train them with {way_out}")


def quoted(argument: str | Path) -> str:
    """Quote an argument of a shell command if needed."""
    return shlex.quote(str(argument))


def write_published(export: Export, heads: Checkpoint, extra: dict[str, str] | None = None) -> None:
    """Write the heads with FasterDecoding's tensor names, and their config with the keys of `extra` added."""
    save_tensors(to_published(heads), export.folder / WEIGHTS)
    write_json(export.folder / CONFIG, published_config(heads.config) | (extra or {}))


def published_config(config: MedusaConfig) -> dict[str, object]:
    """Return the heads' config with only the keys that FasterDecoding, TGI, LoRAX and TensorRT-LLM read."""
    return {published: getattr(config, ours) for ours, published in PUBLISHED_KEYS.items()}


def write_choices(export: Export, config: MedusaConfig) -> list[list[int]]:
    """Write the tree for TensorRT-LLM: the tree in the heads' config or, if there is none, `FALLBACK_TREE`.

    The tree is cut to the depth that the heads reach, and to `MAX_CHOICES` nodes.

    Returns:
        The paths of all written nodes. The root is not among them.
    """
    tree = Tree.from_paths(config.tree or named_trees()[FALLBACK_TREE]).clip(config.num_heads)
    # Sorted by depth, so that the first nodes always form a tree.
    paths = sorted((list(path) for path in tree.rank_paths if path), key=lambda path: (len(path), path))[:MAX_CHOICES]
    write_json(export.folder / CHOICES, paths)
    return paths
