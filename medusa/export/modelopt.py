"""The unified format of NVIDIA modelopt and TensorRT-LLM: one folder with the backbone and the heads."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, HEADS_FILES, INDICES, PROVENANCE, Stored, save_tensors
from medusa.errors import RequestError
from medusa.export.base import CHOICES, Export, Written, quoted, require_square, write_choices
from medusa.export.lm_head import with_own_lm_heads
from medusa.export.tensorrt_llm import LOST
from medusa.files import read_json, write_json

HEADS_WEIGHTS = "model-medusa-heads.safetensors"
"""The file of the heads' weights."""
WHOLE, FIRST = "model.safetensors", "model-00001-of-00002.safetensors"
"""A file named `WHOLE` is renamed to `FIRST`, because a loader would read only the file `WHOLE` and no heads."""


def write(export: Export) -> Written:
    """Write a copy of the backbone's folder with K heads of L blocks added to it. Head h adds these tensors:

        medusa_heads.{h}.{l}.linear.weight, .bias     of block l < L
        medusa_heads.{h}.{L}.weight                   of the LM head

    The backbone's config gets `"medusa": {"num_medusa_heads": K, "num_medusa_layers": L}`. The backbone's weights are
    copied unchanged. An index file maps each tensor's name to its file.

    Raises:
        RequestError: the heads are of another kind, or the backbone is not a local folder with safetensors.
    """
    require_square(export.heads.config, "modelopt")
    base = Path(export.backbone)
    stored = Stored.of_model(base) if base.is_dir() else None
    if stored is None or {path.suffix for path in stored.paths} != {".safetensors"}:
        raise RequestError(
            f"modelopt includes the backbone: --backbone must be a local folder with safetensors, and {base} is not"
        )
    heads = with_own_lm_heads(export)
    left_out = {CONFIG, PROVENANCE, INDICES[0], f"{WHOLE}.index.json", *HEADS_FILES}
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in left_out and (path.suffix != ".safetensors" or path in stored.paths):
            shutil.copyfile(path, export.folder / _renamed(path))
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in to_published(heads).items()}
    save_tensors(tensors, export.folder / HEADS_WEIGHTS)
    places = {name: _renamed(path) for name, path in stored.places.items()}
    size = sum((export.folder / name).stat().st_size for name in {*places.values(), HEADS_WEIGHTS})
    index = {"metadata": {"total_size": size}, "weight_map": places | dict.fromkeys(tensors, HEADS_WEIGHTS)}
    write_json(export.folder / INDICES[0], index)
    count, layers = heads.config.num_heads, heads.config.num_layers
    about = {"medusa": {"num_medusa_heads": count, "num_medusa_layers": layers}}
    write_json(export.folder / CONFIG, read_json(base / CONFIG) | about)
    choices = write_choices(export, heads.config)
    return Written(
        serve=f"python examples/llm-api/llm_medusa_decoding.py --use_modelopt_ckpt --model_dir {quoted(export.place)}",
        lost=LOST,
        heads=replace(heads, config=replace(heads.config, base_model_name_or_path=str(export.place))),
        notes=[
            f"in TensorRT-LLM's script give MedusaDecodingConfig num_medusa_heads={count}, "
            f"max_draft_len={len(choices)} and the paths of {CHOICES}",
        ],
    )


def _renamed(path: Path) -> str:
    """Return the name that a file of the backbone gets in the exported folder."""
    return FIRST if path.name == WHOLE else path.name
