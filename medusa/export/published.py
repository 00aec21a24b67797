"""Formats with FasterDecoding's tensor names: the original, and one for Text Generation Inference (TGI) and LoRAX."""

from __future__ import annotations

import torch

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, LEGACY_WEIGHTS, WEIGHTS, save_tensors
from medusa.config import PUBLISHED_KEYS, MedusaConfig
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted, require_square, with_own_lm_heads
from medusa.files import write_json


def write_config(export: Export, config: MedusaConfig, **extra: str) -> None:
    """Write `config.json` with only the keys that FasterDecoding, TGI and LoRAX read, and `extra`."""
    known = {published: getattr(config, ours) for ours, published in PUBLISHED_KEYS.items()}
    write_json(export.folder / CONFIG, known | extra)


def write_original(export: Export) -> Written:
    """Write `config.json` and `medusa_lm_head.pt`, the state dict of an nn.ModuleList, for the package medusa-llm.

    medusa-llm builds all blocks of a head as one shared block. So the blocks of a head must have equal weights.
    Raise RequestError if blocks differ, or the heads are not of kind `medusa` with square blocks (`require_square`)."""
    config, tensors = export.heads.config, export.heads.tensors
    require_square(config, "original-v1")
    for module, tensor in tensors.items():
        if module.startswith("blocks.") and not torch.equal(tensor, tensors[f"blocks.0.{module.split('.')[2]}"]):
            raise RequestError(
                f"original-v1 cannot hold heads of {config.num_layers} different blocks: its loader would use "
                "one block for all; train them with heads.layers=1"
            )
    heads = with_own_lm_heads(export)
    # Cloned, because torch.save would store the weights of all heads for each view of them.
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in to_published(heads).items()}
    torch.save(copies, export.folder / LEGACY_WEIGHTS)
    write_config(export, heads.config)
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
    """Write `config.json` and `medusa_lm_head.safetensors` for Text Generation Inference and LoRAX.

    Version 2 of the format stores heads of one block that share the backbone's LM head. Version 1 stores all other
    heads, each with an LM head. The config has no key `architectures`: with it, TGI would not recognise the heads and
    would start without them. Raise RequestError unless the heads are of kind `medusa` with square blocks, without
    prefix layers or a reduced vocabulary."""
    config = export.heads.config
    require_square(config, "tgi")
    second = config.lm_head == "shared" and config.num_layers == 1
    heads = export.heads if second else with_own_lm_heads(export)
    save_tensors(to_published(heads), export.folder / WEIGHTS)
    write_config(export, config, **({"version": "2"} if second else {}))
    place, backbone = quoted(export.place), quoted(export.backbone)
    return Written(
        serve=f"text-generation-launcher --model-id {place} --speculate {config.num_heads}",
        lost="one chain of best guesses instead of a tree, and none in steps of more than 128 tokens; penalties "
        "and grammars look at the same text for all guesses of a step, so that these may change the output",
        heads=heads,
        notes=[
            f"LoRAX: lorax-launcher --model-id {backbone} --adapter-id {place} --adapter-source local",
            f"{backbone} is where the server looks for the backbone; name it with --backbone as the server sees it",
        ],
    )
