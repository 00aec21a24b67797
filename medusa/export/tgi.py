"""The format of Text Generation Inference and LoRAX: `config.json` and `medusa_lm_head.safetensors`."""

from __future__ import annotations

from medusa.export.base import Export, Written, quoted, require_square, write_published
from medusa.export.lm_head import with_own_lm_heads


def write(export: Export) -> Written:
    """Write `config.json` and `medusa_lm_head.safetensors` for Text Generation Inference (TGI) and LoRAX.

    Version 2 of the format stores heads of one block that share the backbone's LM head. Version 1 stores all other
    heads, each with an LM head. The config has no key `architectures`, because TGI would then not recognise the heads
    and start without them.

    Raises:
        RequestError: the heads are of another kind, or have other blocks, prefix layers or a reduced vocabulary.
    """
    heads = export.heads
    require_square(heads.config, "tgi")
    shared = heads.config.lm_head == "shared" and heads.config.num_layers == 1
    if not shared:
        heads = with_own_lm_heads(export)
    write_published(export, heads, {"version": "2"} if shared else None)
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
