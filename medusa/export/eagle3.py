"""Export of `eagle` heads as a layer of EAGLE-3: `config.json` and `model.safetensors` for vLLM and SGLang."""

from __future__ import annotations

import torch

from medusa.checkpoints.eagle3 import to_eagle3
from medusa.checkpoints.stored import CONFIG, save_tensors
from medusa.config import GATED, GATED_EPS
from medusa.errors import RequestError
from medusa.export.base import MODEL_WEIGHTS, Export, Written, quoted
from medusa.files import write_json
from medusa.heads.context_kv import BASE, attention_heads
from medusa.loading import load_config


def write_eagle3(export: Export, name: str) -> None:
    """Write heads of kind `eagle` as a layer of EAGLE-3 for the server `name` (tensors: `medusa.checkpoints.eagle3`).

    Raise RequestError if EAGLE-3's layer cannot represent the heads, or they belong to a backbone of other sizes."""
    heads, config = export.heads, export.heads.config
    if not config.servable:
        wanted = {"block": GATED, "lm_head": "shared", "prefix_layers": 0}
        settings = [f"heads.{key}={value}" for key, value in wanted.items() if getattr(config, key) != value]
        raise RequestError(
            f"{name} runs heads of kind eagle only as the layer of EAGLE-3, which these are not; train them with "
            + " ".join(settings)
        )
    backbone = load_config(export.backbone).get_text_config(decoder=True)
    if backbone.hidden_size != config.hidden_size or config.vocab_size not in (None, backbone.vocab_size):
        raise RequestError(f"these heads do not fit {export.backbone}, which has other sizes; name the right backbone")
    tensors = to_eagle3(heads)
    if config.vocabulary is not None:
        tokens = heads.tensors["vocabulary"]
        tensors["lm_head.weight"] = export.lm_head()[tokens].to(heads.dtype)
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
    """Write heads of kind `eagle` as a layer of EAGLE-3 for SGLang; raise RequestError for all other heads."""
    if export.heads.config.kind != "eagle":
        raise RequestError(
            "sglang has no Medusa heads; train kind eagle with "
            f"heads.kind=eagle heads.block={GATED} heads.lm_head=shared, or export to vllm"
        )
    write_eagle3(export, "sglang")
    steps = export.heads.config.num_heads
    return Written(
        serve=f"python -m sglang.launch_server --model-path {quoted(export.backbone)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {quoted(export.place)} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 4 --speculative-num-draft-tokens {4 * steps}",
        lost="no tree of your own: SGLang grows one from --speculative-eagle-topk and --speculative-num-draft-tokens",
        heads=export.heads,
    )
