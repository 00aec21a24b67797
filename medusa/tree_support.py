"""What a model's config says about trees: whether the model can verify one, and which masks and inputs it needs.

This code needs only torch and transformers, because `medusa.export.hub_code` copies it into Hub repositories."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

# One mask, or one for each kind of layer, by transformers' names; None: no layer, or none of this kind, takes a mask.
Mask = Tensor | dict[str, Tensor | None] | None
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # they accept a tree mask
STATES = ("linear_attention", "conv")  # layers with states instead of keys and values
BOTH = {"hybrid": FULL, "hybrid_sliding": SLIDING}  # layers with states, too, and the kind of their attention
NEITHER = ("moe", "mlp")  # they read one token at a time
ALIBI = "its ALiBi biases follow slot indices, not positions"
MASK_BLIND = {"mpt": ALIBI, "bloom": ALIBI}
MASK_BLIND |= dict.fromkeys(("inkling_text", "inkling2_text"), "its relative biases follow slot indices, not positions")
MASK_BLIND["gpt_neo"] = "its local attention uses a window of its own by slot index and ignores ours"
"""Model types whose attention does not follow a tree mask, with the reason (measured). A test of logits does not find
them: GPT-Neo's window is longer than the tested text, and half precision hides the biases of MPT."""
STATE_FUNCTIONS = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)
"""The functions of transformers' files that update states. Each recurrent layer convolves first."""
OWN_UPDATES = {
    "minimax": "its linear attention updates its state in its own code, with a cache of its own",
    "recurrent_gemma": "its recurrent layers keep their states in their modules",
    "rwkv": "its states are a list of tensors of its own, not a cache of transformers",
    "xlstm": "its states are in a cache of its own",
    "zaya": "its attention mixes neighbouring tokens by a convolution in its own code",
}
"""Why the states of some model types cannot branch."""
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Model inputs that mark which tokens are text (0), and which stand for images or sound."""


DRAFT_SLOTS = 512
"""Slots that are left for a draft where a model limits its slots."""


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of the text decoder, which is a part of the config of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def without_text_types(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return model `inputs` without token types that are all zero, if these only say that all tokens are text.

    In a model that reads nothing but text, they can say more: GPT-2 adds the embedding of the id 0 to every token."""
    reads_more, named = text_config(model) is not model.config, inspect.signature(model.forward).parameters
    types = {name for name in TOKEN_TYPES if reads_more or name not in named}
    return {
        name: value
        for name, value in inputs.items()
        if not (name in types and isinstance(value, Tensor) and not value.any())
    }


def context_of(config: PretrainedConfig) -> int | None:
    """Return the number of tokens that a text of a model with this `config` may have; `None`: unknown.

    Llama 4 multiplies the queries of layers without RoPE by a factor that grows with the slot of a token, in steps of
    `floor_scale` slots. Nodes of a tree and short rows of a batch have other slots than positions, so their texts end
    before the first step, with room for a draft."""
    config = config.get_text_config(decoder=True)
    context: int | None = getattr(config, "max_position_embeddings", None)
    if (most := slot_limit(config)) is None:
        return context
    return min(context or most, max(most + 1 - DRAFT_SLOTS, (most + 1) // 2))


def slot_limit(config: PretrainedConfig) -> int | None:
    """Return how many slots of a cache the decoder with this `config` may use (`context_of`); `None`: any number."""
    scales = getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", [1]))
    return int(config.floor_scale) - 1 if scales else None


def longrope_boundary(model: PreTrainedModel) -> int | None:
    """Return the text length above which `longrope` (a RoPE scaling) rotates all tokens differently; `None` without it.

    Scaling of type `dynamic` does so, too, but only beyond the model's context length, where decoding has stopped."""
    config = text_config(model)
    long = [kind for kind in rope_kinds(config) if kind.get("rope_type") == "longrope"]
    ends = [kind.get("original_max_position_embeddings") or config.original_max_position_embeddings for kind in long]
    return min(ends, default=None)


def rope_kinds(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of RoPE in the config of a text decoder: one set, or one for each type of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]


def _why_no_adapter(model: PreTrainedModel) -> str | None:
    """Return the reason why peft's `generate` of this model does more than the model's forward; `None`: it does not."""
    prepares = vars(model).get("prepare_inputs_for_generation")  # peft sets its own on the model that it wraps
    tuned = getattr(getattr(prepares, "__self__", model), "active_peft_config", None)
    if getattr(tuned, "is_prompt_learning", False):
        return "peft puts a soft prompt before its text, which a tree does not read; train another kind of adapter"
    if getattr(tuned, "alora_invocation_tokens", None):
        return "its adapter (aLoRA) begins in the middle of a text; train another kind of adapter"
    return None


def drop_call_hooks(model: PreTrainedModel) -> bool:
    """Remove the hooks by which peft's `generate` chooses adapters for one call; return whether there were any.

    A decoding method calls this that refuses such a call: if an error ends its `generate`, peft leaves the hooks."""
    found = False
    for module in model.modules() if hasattr(model, "peft_config") else ():
        for key, hook in [*module._forward_pre_hooks.items()]:
            if {*getattr(hook, "keywords", ())} & {"adapter_names", "alora_offsets"}:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                found = True
    return found


def why_no_tree(model: PreTrainedModel, branches_states: bool = False) -> str | None:
    """Return the reason why the model cannot verify a tree in one forward; `None` if the config shows no reason.

    `branches_states`: whether the caller can let the states of recurrent layers branch, as `decode` does."""
    if (reason := _why_no_adapter(model)) is not None:
        return reason
    config = text_config(model)
    types = set(getattr(config, "layer_types", None) or ())
    unfit = sorted(types - {FULL, SLIDING, CHUNKED, *STATES, *BOTH, *NEITHER})
    attention = getattr(config, "_attn_implementation", None) or ""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    if unfit:
        return f"its layers ({', '.join(unfit)}) choose by themselves what a token sees"
    if LayerTypes(config).has_states or (getattr(model, "_is_stateful", False) and not types):
        if not branches_states:
            return "its layers keep states, which only the package medusa lets branch"
        if not updates_by_functions(model):
            return OWN_UPDATES.get(config.model_type, "its recurrent layers update their states in code of their own")
    if config.model_type in MASK_BLIND:
        return MASK_BLIND[config.model_type]
    if getattr(config, "alibi", False):
        return ALIBI
    if any(name in attention for name in ("flash", "flex", "paged")):
        return f"attention {attention!r} takes no tree mask; load it with sdpa or eager (--attention sdpa)"
    return None


def updates_by_functions(model: PreTrainedModel) -> bool:
    """Whether the file of recurrent layers has a function that we can replace, as all but a few files do."""
    files = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules.get(file), STATE_FUNCTIONS[0]) for file in files)


class LayerTypes:
    """What the layers of one model keep of the text: keys and values, states, both, or nothing."""

    def __init__(self, config: PretrainedConfig) -> None:
        names = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
        states = getattr(config, "number_of_conv_states", 1)
        self.attends_and_has_states = [
            (name not in (*STATES, *NEITHER), states if name in STATES or name in BOTH else 0) for name in names
        ]
        """For each layer, whether it attends, and how many convolutions with states it has."""

    @property
    def has_states(self) -> bool:
        return any(states for _, states in self.attends_and_has_states)


class LayerKind(NamedTuple):
    """A kind of attention layer: full attention, a sliding window, or chunks."""

    name: str = FULL
    window: int | None = None  # a query sees keys at most `window - 1` positions before it
    chunk: int | None = None  # a query sees only keys of its own chunk of positions

    def limited(self, allowed: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return the mask `allowed` with keys outside the window or chunk hidden; `query` and `key` are positions."""
        if self.window is not None:
            allowed = allowed & (query - key < self.window)
        if self.chunk is not None:
            allowed = allowed & (query // self.chunk == key // self.chunk)
        return allowed


FULL_LAYER = LayerKind()


class LayerKinds:
    """The kinds of attention layers in one model."""

    def __init__(self, config: PretrainedConfig) -> None:
        named = getattr(config, "layer_types", None)
        self.is_dict = named is not None  # whether the model takes a dict of masks
        window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        names = sorted(set(named)) if named is not None else [SLIDING if window else CHUNKED if chunk else FULL]
        self.is_full = names == [FULL]  # whether every attention layer of the model sees the whole text
        limits = {SLIDING: (window, None), CHUNKED: (None, chunk)}
        attends = [name for name in names if name not in STATES and name not in NEITHER]
        self.kinds = [LayerKind(name, *limits.get(BOTH.get(name, name), ())) for name in attends]
        self.others = dict.fromkeys(set(names) - {*attends} | ({STATES[0]} if {*names} & {*BOTH} else set()))

    def masks(self, of_kind: Callable[[LayerKind], Tensor]) -> Mask:
        """Make a mask for each kind of attention with `of_kind`; return them by name, or one if the model takes one."""
        masks = {kind.name: of_kind(kind) for kind in self.kinds}
        if not self.is_dict:
            return next(iter(masks.values()))
        # Some models ask for the masks of a hybrid layer's two parts by their names.
        by_attention = {BOTH[name]: mask for name, mask in masks.items() if name in BOTH}
        return {**self.others, **by_attention, **masks} if masks else None


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Make an additive mask: 0 where `allowed` is true, else the least finite number of `dtype`; its rows are aligned.

    Kernels of scaled_dot_product_attention on a GPU read masks in blocks of 16 bytes. They need a first element at a
    multiple of 16 bytes, and rows that are a multiple of 8 elements apart."""
    width = allowed.shape[-1]
    zeros = torch.zeros(*allowed.shape[:-1], aligned(width), dtype=dtype, device=allowed.device)[..., :width]
    return zeros.masked_fill_(~allowed, torch.finfo(dtype).min)


def aligned(width: int) -> int:
    """Return the number of elements that a row of an attention mask occupies: `width`, or the next multiple of 8."""
    return -(-width // 8) * 8
