"""The `config.json` of published block drafters, read as a `MedusaConfig`. The tensors are in `dflash.py`.

The file describes the layers as a Qwen3 model. z-lab's has further keys in `dflash_config` or at top level, DeepSpec's
at top level, and speculators' has the description in `transformer_layer_config`:

    architectures                       DFlashDraftModel, DFlash2DraftModel, or Qwen3DSparkModel (DeepSpec)
    speculators_model_type              dflash, dflash2 or dspark
    target_layer_ids                    i stands for the output of layer i, from 0
    aux_hidden_state_layer_ids          speculators: i stands for the state after i layers
    block_size, mask_token_id
    layer_types, sliding_window         windows; a sliding layer is causal in the block,
    is_causal, causal_head              unless one of these (for all layers), or
    sliding_window_non_causal           speculators' key says otherwise
    sample_from_anchor                  speculators: the layout, true for `shifted`
    markov_rank, markov_head_type       of DSpark; rank 0: no edges
    enable_confidence_head, confidence_head_with_markov                    of DSpark; read from the tensors
    conv_kernel_size, conv_group_size, selector_rank, selector_top_k       of DFlash 2; read from the tensors
    input_embedding_scale, output_multiplier, final_logit_softcapping

Without `target_layer_ids` the layers are z-lab's default, which depends on `num_target_layers`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

from medusa.checkpoints.eagle_config import config_of_layers, section, sizes_of
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json
from medusa.heads.eagle_layer import GATED

LAYOUT_OF = {"DFlashDraftModel": "fill", "DFlash2DraftModel": "fill", "Qwen3DSparkModel": "shifted"}  # by architecture
SPECULATORS = ("dflash", "dflash2", "dspark")
EDGES_BY = {"markov": "markov_head.markov_w1.weight", "pairwise": "candidate_selector.predecessor_codebook"}
"""The tensor that shows each kind of edges."""
CONFIDENCE = "confidence_head.proj.weight"
BLOCK_SIZE = 16  # of z-lab, if a file names none
NOT_READABLE = {  # parts that `medusa.heads.dflash` does not have, by the names of their tensors
    r"markov_head\.(?!markov_w[12]\.weight$).*": "Markov edges of another type than vanilla",
    r"confidence_(?!head\.proj\.(weight|bias)$).*": "a confidence of another form than DSpark's",
    r".*self_attn\.[a-z]+_proj\.bias": "attention with biases",
    r".*self_attn\.(kv_a|kv_b|q_a|q_b)\w*\..*": "multi-head latent attention (MLA)",
    r".*self_attn\.sinks.*": "attention sinks",
    r".*(gate_proj|g_proj)\.weight(?<!mlp\.gate_proj\.weight)": "gates",
    r".*(pre|post)_feedforward_layernorm\..*": "layers of Gemma's shape",
}


def is_block_drafter(names: Iterable[str]) -> bool:
    """Whether tensors with these names, without a prefix, are a block drafter: features have a norm outside a layer."""
    return {"fc.weight", "hidden_norm.weight"} <= {*names}


def require_readable(tensors: Mapping[str, Tensor], published: Json, source: str) -> None:
    """Raise RequestError with a name for what such a file has and `medusa.heads.dflash` has not."""
    for pattern, what in NOT_READABLE.items():
        if name := next((name for name in tensors if re.fullmatch(pattern, name)), None):
            raise RequestError(f"{source} holds {name}: {what} cannot be loaded")
    if CONFIDENCE in tensors and EDGES_BY["markov"] not in tensors:
        raise RequestError(f"{source} holds {CONFIDENCE}: a confidence without Markov edges cannot be loaded")
    if "layers.0.self_attn.q_norm.weight" not in tensors:
        raise RequestError(f"{source} misses layers.0.self_attn.q_norm.weight: only layers of Qwen3's shape are loaded")
    kind, names = published.get("speculators_model_type"), published.get("architectures") or ["DFlashDraftModel"]
    if kind is not None and kind not in SPECULATORS:
        raise RequestError(f"{source}: its speculators_model_type is {kind!r}; {' or '.join(SPECULATORS)} can be read")
    if kind is None and (not isinstance(names, list) or names[0] not in LAYOUT_OF):
        raise RequestError(f"{source}: its architectures is {names!r}; {' or '.join(LAYOUT_OF)} can be read")
    if published.get("markov_rank") and published.get("markov_head_type", "vanilla") != "vanilla":
        raise RequestError(f"{source}: its markov_head_type is {published['markov_head_type']!r}; only vanilla is read")


def read_dflash_config(
    tensors: Mapping[str, Tensor], published: Json, source: str, own_mask: bool = False
) -> MedusaConfig:
    """Make the config of `dflash` heads from the content `published` of a `config.json`, and the tensors beside it.

    `own_mask`: whether the file brings a vector for mask tokens. Raise RequestError if the drafter is of a form that
    `medusa.heads.dflash` does not have."""
    require_readable(tensors, published, source)
    inner, speculators = (section(published, key, source) for key in ("dflash_config", "speculators_config"))
    given = published | section(published, "transformer_layer_config", source)
    layers = config_of_layers(tensors, given, source, Qwen3Config)
    sizes = sizes_of(layers) | {"variants": ["qk_norm"]}
    keys = given | inner
    windows, causal = _attention(layers, keys, source)
    layout = _layout(published, source)
    block_size = _whole(keys, "block_size", source, BLOCK_SIZE)
    edges = next((name for name, table in EDGES_BY.items() if table in tensors), "none")
    base = tensors.get("layers.0.attention_conv.base_kernel")
    confidence = tensors.get(CONFIDENCE)
    offsets, vocab_size = tensors.get("d2t"), given.get("vocab_size")
    fewer = offsets is not None and (len(offsets) != vocab_size or bool(offsets.any()))
    cap = keys.get("final_logit_softcapping")
    return MedusaConfig(
        hidden_size=sizes["hidden_size"],
        vocab_size=vocab_size,
        num_heads=block_size - (layout == "fill"),
        num_layers=sizes["layers"],
        kind="dflash",
        block=GATED,
        expansion=sizes["width"] / sizes["hidden_size"],
        lm_head="one" if "lm_head.weight" in tensors else "shared",
        vocabulary=len(offsets) if offsets is not None and fewer else None,
        feature_layers=_feature_layers(tensors, keys, sizes["layers"], source),
        layout=layout,
        edges=edges,
        rank=None if edges == "none" else tensors[EDGES_BY[edges]].shape[-1],
        conv=None if base is None else [base.shape[1], _whole(keys, "conv_group_size", source)],
        mask_token=None if own_mask else _whole(keys, "mask_token_id", source),
        layer=sizes,
        windows=windows,
        causal=causal,
        confidence=confidence is not None,
        confidence_edges=confidence is None or confidence.shape[-1] != sizes["hidden_size"],
        embeddings="own" if "embed_tokens.weight" in tensors else "shared",
        embedding_scale=keys.get("input_embedding_scale", 1.0),
        logit_scale=keys.get("output_multiplier", 1.0),
        logit_cap=cap if cap != 0 else None,
        base_model_name_or_path=published.get("base_model_name_or_path")
        or section(speculators, "verifier", source).get("name_or_path"),
    )


def _layout(published: Json, source: str) -> str:
    """Return where a token of the block guesses: `fill` or `shifted` (`medusa.heads.dflash`)."""
    kind, shifted = published.get("speculators_model_type"), published.get("sample_from_anchor")
    if kind is None:
        return LAYOUT_OF[(published.get("architectures") or ["DFlashDraftModel"])[0]]
    if shifted is None and kind == "dspark":  # projects take different defaults
        raise RequestError(f"{source}: its config.json has no sample_from_anchor; write true for the shifted layout")
    return "shifted" if shifted else "fill"


def _attention(layers: PretrainedConfig, keys: Json, source: str) -> tuple[list[int | None], list[bool]]:
    """Return the window of each layer, and whether its attention is causal in the block."""
    types = layers.layer_types or ["full_attention"] * layers.num_hidden_layers
    if unknown := {*types} - {"full_attention", "sliding_attention"}:
        raise RequestError(f"{source}: its layer_types has {min(unknown)}; such a layer cannot be loaded")
    sliding = [kind == "sliding_attention" for kind in types]
    for_all = keys.get("is_causal")
    if keys.get("causal_head"):
        for_all = True
    both_ways = bool(keys.get("sliding_window_non_causal"))
    causal = [slides and not both_ways if for_all is None else bool(for_all) for slides in sliding]
    return [layers.sliding_window if slides else None for slides in sliding], causal


def _feature_layers(tensors: Mapping[str, Tensor], keys: Json, count: int, source: str) -> list[int]:
    """Return the numbers of the layers that `fc` joins: i stands for the state after i layers.

    `count` is the number of the drafter's own layers, on which z-lab's default depends."""
    size, inputs = tensors["fc.weight"].shape
    found, first = keys.get("aux_hidden_state_layer_ids"), 0
    if found is None:
        found, first = keys.get("target_layer_ids"), 1
    if found is None:
        total = _whole(keys, "num_target_layers", source)
        found = [total // 2] if count == 1 else [round(1 + i * (total - 4) / (count - 1)) for i in range(count)]
    if not isinstance(found, list) or any(type(number) is not int for number in found):
        raise RequestError(f"{source}: its numbers of layers are {found!r}; they must be a list of whole numbers")
    if len(found) * size != inputs:
        raise RequestError(f"{source}: fc.weight joins {inputs} numbers, not those of {len(found)} layers of {size}")
    return [number + first for number in found]


def _whole(keys: Json, key: str, source: str, default: int | None = None) -> int:
    """Return the whole number `key`; raise RequestError if it is missing without a default, or something else."""
    value = keys.get(key, default)
    if type(value) is not int:
        raise RequestError(f"{source}: its {key} is {value!r}; it must be a whole number")
    return value
