"""NVIDIA modelopt's and TensorRT-LLM's unified format: one folder with the backbone and the heads.

    medusa_heads.{h}.{l}.linear.weight  .bias   medusa_heads.{h}.{L}.weight     with the backbone's own tensors

and in the backbone's config `"medusa": {"num_medusa_heads": K, "num_medusa_layers": L}`. The backbone's files are
copied unchanged; a single file of weights becomes the first of two, with an index.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, HEADS_FILES, INDICES, PROVENANCE, Stored, save_tensors
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted, require_square
from medusa.export.lm_head import with_own_lm_heads
from medusa.export.tensorrt_llm import CHOICES, LOST, write_choices
from medusa.files import read_json, write_json

NAME, WEIGHTS = "modelopt", "model-medusa-heads.safetensors"
WHOLE, FIRST = "model.safetensors", "model-00001-of-00002.safetensors"
"""A single file would be taken for the whole model, so it gets the name of the first of two."""


def write(export: Export) -> Written:
    require_square(export.heads.config, NAME)
    base = Path(export.backbone)
    stored = Stored.of_model(base) if base.is_dir() else None
    if stored is None or {path.suffix for path in stored.paths} != {".safetensors"}:
        raise RequestError(
            f"{NAME} holds the backbone, too: --backbone must be a folder with its safetensors, and {base} is not"
        )
    heads = with_own_lm_heads(export)
    left_out = {CONFIG, PROVENANCE, INDICES[0], f"{WHOLE}.index.json", *HEADS_FILES}
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in left_out and (path.suffix != ".safetensors" or path in stored.paths):
            shutil.copyfile(path, export.folder / _renamed(path))
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in to_published(heads).items()}
    save_tensors(tensors, export.folder / WEIGHTS)
    places = {name: _renamed(path) for name, path in stored.places.items()}
    size = sum((export.folder / name).stat().st_size for name in {*places.values(), WEIGHTS})
    index = {"metadata": {"total_size": size}, "weight_map": places | dict.fromkeys(tensors, WEIGHTS)}
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
    return FIRST if path.name == WHOLE else path.name
