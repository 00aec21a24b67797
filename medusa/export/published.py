"""Formats with the published names of tensors (`medusa.checkpoints.published`): FasterDecoding, TGI, TensorRT-LLM."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import (
    CONFIG,
    HEADS_FILES,
    INDICES,
    LEGACY_WEIGHTS,
    PROVENANCE,
    WEIGHTS,
    Stored,
    save_tensors,
)
from medusa.config import PUBLISHED_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted, require_square, with_own_lm_heads
from medusa.files import read_json, write_json
from medusa.tree import Tree, named_trees

CHOICES, MAX_CHOICES, FALLBACK_TREE = "medusa_choices.json", 63, "mc_sim_7b_63"
TENSORRT_LOST = "greedy decoding only; one tree, given when the engine is built; Llama and Qwen backbones only"
MODELOPT_WEIGHTS = "model-medusa-heads.safetensors"
WHOLE, FIRST = "model.safetensors", "model-00001-of-00002.safetensors"
"""A single file would be taken for the whole model, so it gets the name of the first of two."""


def write_original(export: Export) -> Written:
    """Write FasterDecoding's first format: `config.json` and `medusa_lm_head.pt`, the state dict of an nn.ModuleList.

    Its code puts one block L times into a head, so that of several blocks the last one's weights are used for all.
    """
    name, config, tensors = "original-v1", export.heads.config, export.heads.tensors
    require_square(config, name)
    for module, tensor in tensors.items():
        if module.startswith("blocks.") and not torch.equal(tensor, tensors[f"blocks.0.{module.split('.')[2]}"]):
            raise RequestError(
                f"{name} cannot hold heads of {config.num_layers} different blocks: its loader would take "
                "one for all; train them with heads.layers=1"
            )
    heads = with_own_lm_heads(export)
    # Copies: a view of the stacked weights would be saved with the storage of all heads.
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in to_published(heads).items()}
    torch.save(copies, export.folder / LEGACY_WEIGHTS)
    write_json(export.folder / CONFIG, _published_config(heads.config))
    return Written(
        serve=f"python -m medusa.inference.cli --model {quoted(export.place)}",
        lost="samples are not the model's (typical acceptance at every temperature above 0), one text at a time, "
        "Llama backbones only",
        heads=heads,
        notes=[
            "the command is that of FasterDecoding's package medusa-llm, in an environment without this one",
            "its last sources make five heads whatever the config says, and fill up with untrained ones",
        ],
    )


def write_tgi(export: Export) -> Written:
    """Write Text Generation Inference's and LoRAX's format: `config.json` and `medusa_lm_head.safetensors`.

    Heads of one block that share the backbone's LM head are "version 2". All others are version 1, in which each head
    has an LM head. The config has no `architectures`: with it, TGI would look for another kind of draft and start
    without any.
    """
    heads = export.heads
    require_square(heads.config, "tgi")
    shared = heads.config.lm_head == "shared" and heads.config.num_layers == 1
    if not shared:
        heads = with_own_lm_heads(export)
    _write_published(export, heads, {"version": "2"} if shared else {})
    count, place = heads.config.num_heads, quoted(export.place)
    return Written(
        serve=f"text-generation-launcher --model-id {place} --speculate {count}",
        lost="one chain of best guesses instead of a tree, and none in steps of more than 128 tokens; penalties "
        "and grammars look at the same text for all guesses of a step, so that these may change the output",
        heads=heads,
        notes=[
            f"LoRAX: lorax-launcher --model-id {quoted(export.backbone)} --adapter-id {place} --adapter-source local",
            f"{quoted(export.backbone)} is where the server looks for the backbone; name it with --backbone as the "
            "server sees it",
        ],
    )


def write_tensorrt_llm(export: Export) -> Written:
    """Write the format of TensorRT-LLM's engine flow: `config.json`, `medusa_lm_head.safetensors` and a tree.

    Every head needs an LM head, every block a bias. The tree is given when the engine is built and when it runs.
    """
    require_square(export.heads.config, "tensorrt-llm")
    heads = with_own_lm_heads(export)
    _write_published(export, heads, {})
    choices = _write_choices(export, heads.config)
    place = quoted(export.place)
    return Written(
        serve=f"python examples/medusa/convert_checkpoint.py --model_dir {quoted(export.backbone)} "
        f"--medusa_model_dir {place} --output_dir checkpoint --dtype float16 "
        f"--fixed_num_medusa_heads {heads.config.num_heads} --max_medusa_token_len {len(choices)} && "
        f"trtllm-build --checkpoint_dir checkpoint --output_dir engine --speculative_decoding_mode medusa && "
        f"python examples/run.py --engine_dir engine --tokenizer_dir {quoted(export.backbone)} "
        f'--medusa_choices "$(cat {quoted(export.place / CHOICES)})" --temperature 0.0 --max_output_len 256 '
        '--input_text "Once upon a time"',
        lost=TENSORRT_LOST,
        heads=heads,
    )


def write_modelopt(export: Export) -> Written:
    """Write NVIDIA modelopt's and TensorRT-LLM's unified format: one folder with the backbone and the heads.

        medusa_heads.{h}.{l}.linear.weight  .bias   medusa_heads.{h}.{L}.weight     with the backbone's own tensors

    and in the backbone's config `"medusa": {"num_medusa_heads": K, "num_medusa_layers": L}`. The backbone's files are
    copied unchanged; a single file of weights becomes the first of two, with an index.
    """
    require_square(export.heads.config, "modelopt")
    base = Path(export.backbone)
    stored = Stored.of_model(base) if base.is_dir() else None
    if stored is None or {path.suffix for path in stored.paths} != {".safetensors"}:
        raise RequestError(
            f"modelopt holds the backbone, too: --backbone must be a folder with its safetensors, and {base} is not"
        )
    heads = with_own_lm_heads(export)
    left_out = {CONFIG, PROVENANCE, INDICES[0], f"{WHOLE}.index.json", *HEADS_FILES}
    for path in sorted(base.iterdir()):
        if path.is_file() and path.name not in left_out and (path.suffix != ".safetensors" or path in stored.paths):
            shutil.copyfile(path, export.folder / _renamed(path))
    tensors = {f"medusa_heads.{name}": tensor for name, tensor in to_published(heads).items()}
    save_tensors(tensors, export.folder / MODELOPT_WEIGHTS)
    places = {name: _renamed(path) for name, path in stored.places.items()}
    size = sum((export.folder / name).stat().st_size for name in {*places.values(), MODELOPT_WEIGHTS})
    index = {"metadata": {"total_size": size}, "weight_map": places | dict.fromkeys(tensors, MODELOPT_WEIGHTS)}
    write_json(export.folder / INDICES[0], index)
    count, layers = heads.config.num_heads, heads.config.num_layers
    about = {"medusa": {"num_medusa_heads": count, "num_medusa_layers": layers}}
    write_json(export.folder / CONFIG, read_json(base / CONFIG) | about)
    choices = _write_choices(export, heads.config)
    return Written(
        serve=f"python examples/llm-api/llm_medusa_decoding.py --use_modelopt_ckpt --model_dir {quoted(export.place)}",
        lost=TENSORRT_LOST,
        heads=replace(heads, config=replace(heads.config, base_model_name_or_path=str(export.place))),
        notes=[
            f"in TensorRT-LLM's script give MedusaDecodingConfig num_medusa_heads={count}, "
            f"max_draft_len={len(choices)} and the paths of {CHOICES}",
        ],
    )


def _write_published(export: Export, heads: Checkpoint, extra: dict[str, str]) -> None:
    save_tensors(to_published(heads), export.folder / WEIGHTS)
    write_json(export.folder / CONFIG, _published_config(heads.config) | extra)


def _published_config(config: MedusaConfig) -> dict[str, object]:
    """The keys that FasterDecoding, TGI, LoRAX and TensorRT-LLM read, and no others."""
    return {published: getattr(config, ours) for ours, published in PUBLISHED_KEYS.items()}


def _write_choices(export: Export, config: MedusaConfig) -> list[list[int]]:
    """Write the tree saved with the heads, else a published one, cut to the heads and to the engine's limit of nodes.

    Returns:
        The paths of all nodes without the root.
    """
    tree = Tree.from_paths(config.tree or named_trees()[FALLBACK_TREE]).clip(config.num_heads)
    # By depth, so that the first nodes of a tree that is too large are a tree as well.
    paths = sorted((list(path) for path in tree.rank_paths if path), key=lambda path: (len(path), path))[:MAX_CHOICES]
    write_json(export.folder / CHOICES, paths)
    return paths


def _renamed(path: Path) -> str:
    return FIRST if path.name == WHOLE else path.name
