"""EAGLE-3's form, as vLLM and SGLang load it: `config.json` of a Llama of one layer, and `model.safetensors`.

    layers.0.hidden_norm.weight  .input_layernorm  .post_attention_layernorm [H]   norm.weight [H]
    layers.0.self_attn.{q,k,v}_proj.weight [H, 2 H]   .o_proj.weight [H, H]     of the token, then of the hidden state
    layers.0.mlp.{gate,up}_proj.weight [E, H]   .down_proj.weight [H, E]
    lm_head.weight [N, H]   d2t [N]   t2d [V]                               where heads guess among N tokens only

EAGLE-3 reads hidden states of three layers through `fc`; with `use_aux_hidden_state: false` both servers give it the
last one as it is, like heads here. Embeddings, and an LM head of all tokens, they take from the backbone. Heads of kind
`eagle` with `block: gated` are this very function; how often the layer runs is for whoever serves it to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from medusa.config import GATED, MedusaConfig
from medusa.errors import RequestError
from medusa.export import Export, Written, quoted
from medusa.files import write_json
from medusa.heads.eagle import EPS, EagleHeads
from medusa.heads.kinds import build
from medusa.heads.rope import BASE
from medusa.loading import load_config

WEIGHTS, CONFIG, LAYER = "model.safetensors", "config.json", "layers.0."
STEPS = 5  # where the file does not say
NAMES = {  # ours, theirs
    "feature_norm.weight": f"{LAYER}hidden_norm.weight",
    "token_norm.weight": f"{LAYER}input_layernorm.weight",
    "out.weight": f"{LAYER}self_attn.o_proj.weight",
    "stack.norm.weight": f"{LAYER}post_attention_layernorm.weight",
    "stack.gate.weight": f"{LAYER}mlp.gate_proj.weight",
    "stack.up.weight": f"{LAYER}mlp.up_proj.weight",
    "stack.down.weight": f"{LAYER}mlp.down_proj.weight",
    "norm.weight": "norm.weight",
}
PARTS = tuple(f"{LAYER}self_attn.{part}_proj.weight" for part in "qkv")  # of our `pair.weight`


def require_gated(config: MedusaConfig, name: str) -> None:
    """Raises:
    RequestError: heads of kind eagle that are no layer of EAGLE-3."""
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


def write_vllm(export: Export) -> Written:
    heads = write(export, "vllm")
    asked = {"method": "eagle3", "model": str(export.place), "num_speculative_tokens": heads.config.num_heads}
    return Written(
        serve=f"vllm serve {quoted(export.backbone)} --speculative-config {quoted(json.dumps(asked))}",
        lost="one chain of best guesses in the place of a tree",
        heads=heads,
    )


def write_sglang(export: Export) -> Written:
    if export.heads.config.kind != "eagle":
        raise RequestError(
            "sglang has no Medusa heads; train kind eagle with "
            f"heads.kind=eagle heads.block={GATED} heads.lm_head=shared, or export to vllm"
        )
    heads = write(export, "sglang")
    steps = heads.config.num_heads
    return Written(
        serve=f"python -m sglang.launch_server --model-path {quoted(export.backbone)} --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {quoted(export.place)} --speculative-num-steps {steps} "
        f"--speculative-eagle-topk 4 --speculative-num-draft-tokens {4 * steps}",
        lost="no tree of your own: SGLang grows one from --speculative-eagle-topk and --speculative-num-draft-tokens",
        heads=heads,
    )


def write(export: Export, name: str) -> EagleHeads:
    """The files; returns what must be read again."""
    from medusa.checkpoints.load import save_tensors

    heads, config = export.heads, export.heads.config
    require_gated(config, name)
    assert isinstance(heads, EagleHeads)
    backbone = load_config(export.backbone).get_text_config(decoder=True)
    if backbone.hidden_size != config.hidden_size or config.vocab_size not in (None, backbone.vocab_size):
        raise RequestError(f"these heads are not of {export.backbone}, which has other sizes; name their own backbone")
    state, size = heads.state_dict(), config.hidden_size
    tensors = {theirs: state[ours] for ours, theirs in NAMES.items()}
    # A pair is [hidden state ; token] here and [token ; hidden state] there.
    for theirs, part in zip(PARTS, state["pair.weight"].split(size), strict=True):
        tensors[theirs] = part.roll(size, dims=1)
    if heads.vocabulary is not None:
        words = heads.vocabulary
        tensors["lm_head.weight"] = export.lm_head()[words].to(state["out.weight"].dtype)
        tensors["d2t"] = words - torch.arange(len(words))
        tensors["t2d"] = torch.zeros(backbone.vocab_size, dtype=torch.bool).index_fill(0, words, True)
    save_tensors(tensors, export.folder / WEIGHTS)
    write_json(
        export.folder / CONFIG,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": config.inner_size,
            "num_hidden_layers": 1,
            "num_attention_heads": heads.count,
            "num_key_value_heads": heads.count,
            "head_dim": heads.size,
            "hidden_act": "silu",
            "rms_norm_eps": EPS,
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
            "torch_dtype": str(state["out.weight"].dtype).removeprefix("torch."),
            "medusa_num_heads": config.num_heads,
            "base_model_name_or_path": config.base_model_name_or_path,
        },
    )
    return heads


def is_eagle3(names: Iterable[str]) -> bool:
    """Whether tensors of these names are an EAGLE-3 layer's, which alone has this norm."""
    return any(name.endswith(("layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight")) for name in names)


def from_eagle3(
    stored: Mapping[str, Tensor], published: Mapping[str, Any], source: str
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Config and tensors by our names.

    Raises:
        RequestError: a layer of another make than ours, or a tensor that is missing or unknown.
    """
    tensors = {name.replace("midlayer.", LAYER): stored[name] for name in stored if name != "t2d"}
    if (published.get("eagle_config") or {}).get("use_aux_hidden_state", True) or "fc.weight" in tensors:
        raise RequestError(
            f"{source} reads hidden states of several layers (fc); heads here read the last one "
            "(eagle_config.use_aux_hidden_state false)"
        )
    rope = published.get("rope_parameters") or published.get("rope_scaling") or {}
    for key, value, wanted in (
        ("rms_norm_eps", published.get("rms_norm_eps"), EPS),
        ("rope_theta", rope.get("rope_theta", published.get("rope_theta", BASE)), BASE),
        ("rope_type", rope.get("rope_type", "default"), "default"),
        ("hidden_act", published.get("hidden_act", "silu"), "silu"),
        ("num_hidden_layers", published.get("num_hidden_layers"), 1),
        ("norm_before_residual", bool(published.get("norm_before_residual")), False),
        ("norm_output", bool(published.get("norm_output")), False),
    ):
        if value != wanted:
            raise RequestError(f"{source}: its {key} is {value}; only {wanted} can be read")
    for name in (*NAMES.values(), *PARTS):
        if name not in tensors:
            raise RequestError(f"{source} misses the tensor {name}; its heads are not complete")
    words = None
    if "d2t" in tensors:
        difference = tensors.pop("d2t").to(torch.int64)
        words = difference + torch.arange(len(difference))
    # In ours, and only in ours, copies of the backbone's: rows of its LM head, and all of its embeddings.
    if "lm_head.weight" in tensors and "medusa_num_heads" not in published:
        raise RequestError(f"{source} has an LM head of its own; heads of this kind here share the backbone's")
    unknown = sorted(set(tensors) - {*NAMES.values(), *PARTS, "lm_head.weight", "embed_tokens.weight"})
    if unknown:
        raise RequestError(f"{source} holds the tensor {unknown[0]}, which belongs to no head; remove it")
    size = len(tensors["norm.weight"])
    config = MedusaConfig(
        hidden_size=size,
        vocab_size=published.get("vocab_size"),
        num_heads=published.get("medusa_num_heads", STEPS),
        kind="eagle",
        block=GATED,
        expansion=len(tensors[f"{LAYER}mlp.gate_proj.weight"]) / size,
        lm_head="shared",
        vocabulary=None if words is None else len(words),
        base_model_name_or_path=published.get("base_model_name_or_path"),
    )
    with torch.device("meta"):
        layer = build(config)
    assert isinstance(layer, EagleHeads)
    for key in ("num_attention_heads", "num_key_value_heads"):
        if published.get(key) != layer.count:
            raise RequestError(
                f"{source}: its {key} is {published.get(key)}; heads of this size here have {layer.count}"
            )
    for name in PARTS:
        if tensors[name].shape != (size, 2 * size):
            raise RequestError(f"{source}: {name} has the shape {list(tensors[name].shape)}, not {[size, 2 * size]}")
    pair = torch.cat([tensors[name] for name in PARTS])
    ours = {name: tensors[theirs] for name, theirs in NAMES.items()} | {"pair.weight": pair.roll(size, dims=1)}
    return config, ours if words is None else ours | {"vocabulary": words}
