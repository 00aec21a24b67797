"""Medusa heads as vLLM up to 0.32 loads them: `config.json`, and `model.safetensors` by its own names of the tensors.

    blocks.{h}.layers.{l}.weight [H, H]   blocks.{h}.layers.{l}.bias [H]   lm_heads.{h}.weight [V, H]

or one `lm_head.weight` for all heads that share the backbone's, which it does not borrow: it comes along as a copy.
vLLM passes over tensors that it does not know, and drops biases unless `medusa_fc_bias` is set, so that wrong names
would show in nothing but guesses that are never right. Of keys with "num" and "heads" in them the last one counts.

Heads of kind `eagle` are for any vLLM (`medusa.checkpoints.eagle3`).
"""

from __future__ import annotations

import json

from medusa.checkpoints.eagle3 import write_vllm
from medusa.checkpoints.load import CONFIG, save_tensors, to_published
from medusa.checkpoints.names import SHARED, VLLM
from medusa.export import Export, Written, quoted, require_square
from medusa.export.own import with_own_lm_heads
from medusa.files import write_json

NAME, WEIGHTS = "vllm", "model.safetensors"


def write(export: Export) -> Written:
    if export.heads.config.kind == "eagle":
        return write_vllm(export)
    require_square(export.heads.config, NAME, "heads.kind=medusa, or heads.kind=eagle with heads.block=gated")
    heads = with_own_lm_heads(export)
    config, dtype = heads.config, heads.dtype
    tensors = {VLLM.called(name): tensor for name, tensor in to_published(heads).items()}
    shared = export.heads.lm_heads is None
    if shared:
        of_heads = [tensors.pop(VLLM.lm_head.format(h=head)) for head in range(config.num_heads)]
        tensors[SHARED] = of_heads[0]
    save_tensors(tensors, export.folder / WEIGHTS)
    write_json(
        export.folder / CONFIG,
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": shared,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "base_model_name_or_path": config.base_model_name_or_path,
        },
    )
    asked = {"method": "medusa", "model": str(export.place), "num_speculative_tokens": config.num_heads}
    return Written(
        serve=f"vllm serve {quoted(export.backbone)} --speculative-config {quoted(json.dumps(asked))}",
        lost="one chain of best guesses in the place of a tree; vLLM 0.33 and later have no Medusa heads",
        heads=heads,
        notes=["vllm==0.32.0 is the last version that loads these"],
    )
