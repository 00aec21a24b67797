"""Write EAGLE-3's format (`medusa.checkpoints.eagle3`), which vLLM and SGLang load."""

from __future__ import annotations

import torch

from medusa.checkpoints.eagle3 import NAMES, PAIR_PARTS
from medusa.checkpoints.stored import save_tensors
from medusa.config import GATED, GATED_EPS, MedusaConfig
from medusa.errors import RequestError
from medusa.export.base import Export
from medusa.files import Json, write_json
from medusa.heads.rope import BASE, attention_heads
from medusa.loading import load_config

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def write_eagle3(export: Export, name: str) -> None:
    """Write the files; raise RequestError if the heads are no layer of EAGLE-3, or not of this backbone."""
    heads, config = export.heads, export.heads.config
    require_gated(config, name)
    backbone = load_config(export.backbone).get_text_config(decoder=True)
    if backbone.hidden_size != config.hidden_size or config.vocab_size not in (None, backbone.vocab_size):
        raise RequestError(f"these heads are not of {export.backbone}, which has other sizes; name their own backbone")
    state, size = heads.tensors, config.hidden_size
    tensors = {theirs: state[ours] for ours, theirs in NAMES.items()}
    # A pair is [hidden state ; token] here and [token ; hidden state] there.
    for theirs, part in zip(PAIR_PARTS, state["pair.weight"].split(size), strict=True):
        tensors[theirs] = part.roll(size, dims=1)
    if config.vocabulary is not None:
        tokens = state["vocabulary"]
        tensors["lm_head.weight"] = export.lm_head()[tokens].to(heads.dtype)
        tensors["d2t"] = tokens - torch.arange(len(tokens))
        tensors["t2d"] = torch.zeros(backbone.vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    save_tensors(tensors, export.folder / WEIGHTS)
    context = getattr(backbone, "max_position_embeddings", None) or 2048
    about = eagle3_config(config, heads.dtype, backbone.vocab_size, context)
    write_json(export.folder / CONFIG, about)


def eagle3_config(config: MedusaConfig, dtype: torch.dtype, vocab_size: int, context: int) -> Json:
    """The config of a Llama of one layer, as both servers read it."""
    count = attention_heads(config.hidden_size)
    return {
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
        "max_position_embeddings": context,
        "vocab_size": vocab_size,
        "draft_vocab_size": config.vocabulary,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": False},
        "torch_dtype": str(dtype).removeprefix("torch."),
        "medusa_num_heads": config.num_heads,
        "base_model_name_or_path": config.base_model_name_or_path,
    }


def require_gated(config: MedusaConfig, name: str) -> None:
    """Raise RequestError unless heads of kind eagle are a layer of EAGLE-3."""
    if config.servable:
        return
    wrong = [
        f"heads.block={GATED}" if config.block != GATED else "",
        "heads.lm_head=shared" if config.lm_head != "shared" else "",
        "heads.prefix_layers=0" if config.prefix_layers else "",
    ]
    raise RequestError(
        f"{name} runs heads of kind eagle only as the layer of EAGLE-3, which these are not; train them with "
        + " ".join(filter(None, wrong))
    )
