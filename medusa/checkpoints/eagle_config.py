"""The `config.json` of EAGLE's published layers, read as a `MedusaConfig`. The tensors are in `eagle3.py`.

The file describes the layer as a Llama or a Qwen3 model with few layers. Projects differ in the rest:

    vocab_size, draft_vocab_size              the tokens of the backbone, and those that heads guess among
    target_hidden_size                        the backbone's hidden size, where it is not the layer's
    transformer_layer_config                  speculators: the description of the layer, without default values
    eagle_aux_hidden_state_layer_ids          speculators, vLLM: i stands for the state after i layers
    eagle_config: {the same name}             SpecForge, SGLang: i stands for the output of layer i, from 0
    eagle_config: {use_aux_hidden_state}      false: the layer reads the last hidden state, without `fc`
    norm_before_residual, norm_before_fc,     variants (`medusa.heads.eagle`), here or in `eagle_config`
    fc_norm, norm_output

Without numbers of layers, the layers are those of `medusa.backbone.usual_layers`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from medusa.config import MAX_SIZE, USUAL_LAYERS, MedusaConfig
from medusa.errors import RequestError, first_line
from medusa.files import Json
from medusa.heads.eagle_layer import GATED, ORIGINAL_EAGLE, EagleSettings, LayerSizes, layer_sizes

STEPS = 8  # the number of heads if a file names none, because a layer can run any number of times
IDS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
OF_TENSORS = {  # variants that follow from tensors
    "fc.bias": "fc_bias",
    "input_norm.weight": "norm_before_fc",
    "fc_norm.0.weight": "fc_norm",
    "layers.0.self_attn.q_proj.bias": "attention_bias",
    "layers.0.self_attn.q_norm.weight": "qk_norm",
}


def read_eagle_config(tensors: Mapping[str, Tensor], published: Json, source: str) -> MedusaConfig:
    """Make the config of `eagle` heads from the content `published` of a `config.json`, and the tensors beside it.

    The tensors have the names of `medusa.checkpoints.eagle3`. Raise RequestError if the layer is of a form that
    `medusa.heads.eagle` does not have."""
    eagle, speculators = (section(published, key, source) for key in ("eagle_config", "speculators_config"))
    described = published | section(published, "transformer_layer_config", source)
    sizes = _layer(tensors, described, source)
    size, is_original = sizes["hidden_size"], "layers.0.hidden_norm.weight" not in tensors
    switched = {name for name in SWITCHES if published.get(name, eagle.get(name))}
    sizes["variants"] = sorted(switched | {name for tensor, name in OF_TENSORS.items() if tensor in tensors})
    offsets, vocab_size = tensors.get("d2t"), described.get("vocab_size")
    fewer = offsets is not None and (len(offsets) != vocab_size or bool(offsets.any()))
    verifier = section(speculators, "verifier", source)
    hidden_size = published.get("target_hidden_size") or size
    if not isinstance(hidden_size, int):
        raise RequestError(f"{source}: its target_hidden_size is {hidden_size!r}; it must be a whole number")
    config = MedusaConfig(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_heads=published.get("medusa_num_heads") or proposed(speculators) or STEPS,
        kind="eagle",
        block=ORIGINAL_EAGLE if is_original else GATED,
        expansion=sizes["width"] / size,
        lm_head=_lm_head(tensors, published),
        vocabulary=len(offsets) if offsets is not None and fewer else None,
        feature_layers=None if is_original else _feature_layers(tensors, published, eagle, hidden_size, source),
        layer=sizes,
        embeddings="own" if "embed_tokens.weight" in tensors else "shared",
        base_model_name_or_path=published.get("base_model_name_or_path") or verifier.get("name_or_path"),
    )
    plain = replace(config, own=replace(EagleSettings.of(config), layer=None))
    if hidden_size == size and not size % 2 and layer_sizes(plain) == sizes:
        return plain  # a layer as this package trains it
    return config


def _layer(tensors: Mapping[str, Tensor], described: Json, source: str) -> LayerSizes:
    """Read the sizes of the decoder layers as transformers does; `variants` is still empty."""
    make = Qwen3Config if described.get("model_type") == "qwen3" else LlamaConfig
    config = config_of_layers(tensors, described, source, make)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        wrong = "its layer_types is sliding_attention, not full_attention"
        raise RequestError(f"{source}: {wrong}; such a layer cannot be loaded")
    if "mask_hidden" in tensors:
        wrong = "its mask_hidden is given, so it drafts in parallel (P-EAGLE)"
        raise RequestError(f"{source}: {wrong}; such a layer cannot be loaded")
    return sizes_of(config)


def config_of_layers(
    tensors: Mapping[str, Tensor], described: Json, source: str, make: Callable[..., PretrainedConfig]
) -> PretrainedConfig:
    """Make transformers' config of decoder layers; RequestError if it is none, or does not fit the tensors.

    Raise RequestError for an MLP that is not a Llama's, too."""
    given = {key: value for key, value in described.items() if key not in ("model_type", "architectures")}
    for key in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in section(given, key, source):  # a token of text has one position, so this changes nothing
            kept = {name: value for name, value in given[key].items() if not name.startswith("mrope_")}
            given[key] = {name: value for name, value in kept.items() if value not in ("mrope", "default")} or None
    try:
        config = make(**given)
    except Exception as error:  # transformers checks each value in its own way
        raise RequestError(f"{source}: its config.json describes no layer ({first_line(error)})") from None
    for size in ("hidden_size", "intermediate_size"):
        if not 0 < (found := getattr(config, size)) <= MAX_SIZE:
            raise RequestError(f"{source}: its {size} is {found}; it must be from 1 to {MAX_SIZE}")
    stored = {match[0] for name in tensors if (match := re.match(r"layers\.\d+\.", name))}
    if config.num_hidden_layers != len(stored):
        named = f"its config.json names {config.num_hidden_layers} layers"
        raise RequestError(f"{source}: {named}, and there are tensors of {len(stored)}")
    for name, is_wrong, found in (
        ("hidden_act", config.hidden_act != "silu", f"{config.hidden_act}, not silu"),
        ("mlp_bias", bool(getattr(config, "mlp_bias", False)), "true, not false"),
    ):
        if is_wrong:
            raise RequestError(f"{source}: its {name} is {found}; such a layer cannot be loaded")
    return config


def sizes_of(config: PretrainedConfig) -> LayerSizes:
    """Return the sizes in transformers' config of decoder layers; `variants` is still empty."""
    return LayerSizes(
        hidden_size=config.hidden_size,
        width=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_value_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=config.head_dim or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
        rope=dict(config.rope_parameters or {}),
        variants=[],
    )


def section(content: Json, key: str, source: str) -> Json:
    """Return the object under `key`, empty if there is none; raise RequestError if something else is there."""
    found = content.get(key) or {}
    if not isinstance(found, dict):
        raise RequestError(f"{source}: its {key} is {found!r}; it must be an object")
    return found


def _layer_numbers(content: Json, source: str) -> list[int]:
    """Return the numbers of layers in `content`, empty if there are none; raise RequestError if they are no numbers."""
    found = content.get(IDS) or []
    if not isinstance(found, list) or any(type(number) is not int for number in found):
        raise RequestError(f"{source}: its {IDS} is {found!r}; it must be a list of whole numbers")
    return found


def proposed(speculators: Json) -> int | None:
    """Return the number of tokens that the first proposal method of speculators proposes."""
    match speculators.get("proposal_methods"):
        case [{"speculative_tokens": int(count)}, *_]:
            return count
    return None


def _lm_head(tensors: Mapping[str, Tensor], published: Json) -> str:
    """Return `one` if the layer has an LM head, or `shared` if it has none or a copy of the backbone's."""
    if "medusa_num_heads" in published:  # exports of this package: older ones only have copies
        return str(published.get("medusa_lm_head", "shared"))
    tied = published.get("tie_word_embeddings") and "embed_tokens.weight" in tensors
    return "one" if "lm_head.weight" in tensors or tied else "shared"


def _feature_layers(
    tensors: Mapping[str, Tensor], published: Json, eagle: Json, hidden_size: int, source: str
) -> list[int] | str | None:
    """Return the numbers of the layers that `fc` joins; `None` if the layer reads the last hidden state."""
    if not eagle.get("use_aux_hidden_state", True):
        return None
    if "fc.weight" not in tensors:
        raise RequestError(f"{source} misses the tensor fc.weight, which joins hidden states of several layers")
    inputs = tensors["fc.weight"].shape[-1]
    count = inputs // hidden_size
    layers = _layer_numbers(published, source) or [number + 1 for number in _layer_numbers(eagle, source)]
    fits = len(layers) == count or (not layers and count == 3)
    if not count or count * hidden_size != inputs or not fits:
        which = f"{layers or 'unnamed'} layers of {hidden_size}"
        raise RequestError(f"{source}: fc.weight joins {inputs} numbers of {which}")
    return layers or USUAL_LAYERS
