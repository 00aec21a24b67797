"""Text Generation Inference and LoRAX: `config.json` and `medusa_lm_head.safetensors`, with the published names.

Heads of one block that share the backbone's LM head are "version 2". With LM heads of their own or several blocks they
are version 1, in which each head has an LM head. The config has no `architectures`: TGI would then look for another
kind of draft and start without any.
"""

from __future__ import annotations

from medusa.checkpoints.published import to_published
from medusa.checkpoints.stored import CONFIG, WEIGHTS, save_tensors
from medusa.export.base import Export, Written, published_config, quoted, require_square
from medusa.export.lm_head import with_own_lm_heads
from medusa.files import write_json

NAME = "tgi"


def write(export: Export) -> Written:
    heads = export.heads
    require_square(heads.config, NAME)
    shared = heads.config.lm_head == "shared" and heads.config.num_layers == 1
    if not shared:
        heads = with_own_lm_heads(export)
    save_tensors(to_published(heads), export.folder / WEIGHTS)
    version = {"version": "2"} if shared else {}
    write_json(export.folder / CONFIG, published_config(heads.config) | version)
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
