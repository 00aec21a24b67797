"""Write heads: `config.json`, `medusa_lm_head.safetensors` and, if known, `provenance.json`.

Independent heads are written in the published format (`medusa.checkpoints.published`). Heads of other kinds, heads with
prefix layers and heads with a vocabulary of their own keep the names of their modules; no server reads them.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from medusa.checkpoints.checkpoint import Checkpoint, Tensors
from medusa.checkpoints.layout import CONFIG, PROVENANCE, WEIGHTS
from medusa.checkpoints.published import to_published
from medusa.files import replacing, require_absent, write_json


def save(checkpoint: Checkpoint, folder: Path, overwrite: bool = True) -> None:
    """Write heads into `folder`, each file whole or not at all.

    Raises:
        RequestError: `folder` holds heads already and `overwrite` is off.
    """
    require_absent(folder / WEIGHTS, overwrite)
    save_tensors(to_published(checkpoint), folder / WEIGHTS)
    write_json(folder / CONFIG, checkpoint.config.to_dict())
    if checkpoint.provenance is not None:
        write_json(folder / PROVENANCE, checkpoint.provenance)


def save_tensors(tensors: Tensors, path: Path) -> None:
    """Write tensors as safetensors, the file whole or not at all."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(ready, temporary, metadata={"format": "pt"})
