"""The two formats of TensorRT-LLM: heads for `trtllm-build`'s engines, and NVIDIA modelopt's unified format."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, HEADS_FILES, INDICES, PROVENANCE, Stored, save_tensors
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted, require_square, with_own_lm_heads
from medusa.export.published import write_published
from medusa.files import read_json, write_json
from medusa.tree import Tree, named_trees

CHOICES, MAX_CHOICES = "medusa_choices.json", 63
"""The file of the tree, and the largest number of nodes without the root that the engine allows."""
FALLBACK_TREE = "mc_sim_7b_63"
"""The name of the tree that is written for heads without a tree of their own."""
HEADS_WEIGHTS = "model-medusa-heads.safetensors"
"""The file of the heads' weights in the unified format."""
WHOLE, FIRST = "model.safetensors", "model-00001-of-00002.safetensors"
"""A file named `WHOLE` is renamed to `FIRST`, because a loader would read only the file `WHOLE` and no heads."""
LOST = "greedy decoding only; one tree, given when the engine is built; Llama and Qwen backbones only"
"""The features of this package that TensorRT-LLM does not have."""


def write(export: Export) -> Written:
    """Write `config.json`, `medusa_lm_head.safetensors` and the tree `medusa_choices.json` for `trtllm-build`.

    Every written head has an LM head. The tree is needed twice: to build the engine and to run it. Raise RequestError
    unless the heads are of kind `medusa` with square blocks, without prefix layers or a reduced vocabulary."""
    require_square(export.heads.config, "tensorrt-llm")
    heads = with_own_lm_heads(export)
    write_published(export, heads)
    choices = _write_choices(export, heads.config)
    backbone = quoted(export.backbone)
    return Written(
        serve=f"python examples/medusa/convert_checkpoint.py --model_dir {backbone} "
        f"--medusa_model_dir {quoted(export.place)} --output_dir checkpoint --dtype float16 "
        f"--fixed_num_medusa_heads {heads.config.num_heads} --max_medusa_token_len {len(choices)} && "
        f"trtllm-build --checkpoint_dir checkpoint --output_dir engine --speculative_decoding_mode medusa && "
        f"python examples/run.py --engine_dir engine --tokenizer_dir {backbone} "
        f'--medusa_choices "$(cat {quoted(export.place / CHOICES)})" --temperature 0.0 --max_output_len 256 '
        '--input_text "Once upon a time"',
        lost=LOST,
        heads=heads,
    )


def write_modelopt(export: Export) -> Written:
    """Write a copy of the backbone's folder with K heads of L blocks added to it. Head h adds these tensors:

        medusa_heads.{h}.{l}.linear.weight, .bias     of block l < L
        medusa_heads.{h}.{L}.weight                   of the LM head

    The backbone's config gets `"medusa": {"num_medusa_heads": K, "num_medusa_layers": L}`. The backbone's weights
    are copied unchanged. An index file maps each tensor's name to its file. Raise RequestError unless the heads are of
    kind `medusa` with square blocks (`require_square`), and the backbone is a local folder with safetensors."""
    require_square(export.heads.config, "modelopt")
    base = Path(export.backbone)
    stored = Stored.of_model(base) if base.is_dir() else None
    if not stored or not all(path.suffix == ".safetensors" and path.is_file() for path in stored.paths):
        raise RequestError(
            f"modelopt includes the backbone: --backbone must be a whole local folder with safetensors; {base} is not"
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
    count = heads.config.num_heads
    about = {"num_medusa_heads": count, "num_medusa_layers": heads.config.num_layers}
    write_json(export.folder / CONFIG, read_json(base / CONFIG) | {"medusa": about})
    choices = _write_choices(export, heads.config)
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
    """Return a backbone file's new name: `model.safetensors` is named as a first shard; other names do not change."""
    return FIRST if path.name == WHOLE else path.name


def _write_choices(export: Export, config: MedusaConfig) -> list[list[int]]:
    """Write the config's tree, or `FALLBACK_TREE`, to `medusa_choices.json`; return its paths, without the root's.

    The tree is cut to the depth that the heads reach, and to `MAX_CHOICES` nodes."""
    tree = Tree.from_paths(config.tree or named_trees()[FALLBACK_TREE]).clip(config.num_heads)
    # The paths are sorted by depth, so that the first nodes always form a tree.
    paths = tree.to_json()[:MAX_CHOICES]
    write_json(export.folder / CHOICES, paths)
    return paths
