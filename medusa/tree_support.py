"""What a model's config says about trees: whether the model can verify one, and which masks its layers need.

This code needs only torch and transformers, because `medusa.export.hub_code` copies it into Hub repositories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

Mask = Tensor | dict[str, Tensor]  # one mask, or one for each kind of attention layer, by transformers' names
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # they accept a tree mask
ALIBI = "its ALiBi biases follow slot indices, not positions"
MASK_BLIND = {"mpt": ALIBI, "bloom": ALIBI}
MASK_BLIND["gpt_neo"] = "its local attention uses a window of its own by slot index and ignores ours"
"""Model types whose attention does not follow a tree mask, with the reason (measured). A test of logits does not find
them: GPT-Neo's window is longer than the tested text, and half precision hides the biases of MPT."""


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of the text decoder, which is a part of the config of a multimodal model."""
    return model.config.get_text_config(decoder=True)


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


def why_no_tree(model: PreTrainedModel) -> str | None:
    """Return the reason why the model cannot verify a tree in one forward; `None` if the config shows no reason."""
    config = text_config(model)
    unfit = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING, CHUNKED}
    attention = getattr(config, "_attn_implementation", None) or ""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    if getattr(model, "_is_stateful", False) or unfit:
        named = ", ".join(sorted(unfit)) or "recurrent"
        return f"its layers ({named}) keep a state that cannot branch, or choose by themselves what to see"
    if config.model_type in MASK_BLIND:
        return MASK_BLIND[config.model_type]
    if getattr(config, "alibi", False):
        return ALIBI
    if any(name in attention for name in ("flash", "flex", "paged")):
        return f"attention {attention!r} takes no tree mask; load it with sdpa or eager (--attention sdpa)"
    return None


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
        self.kinds = [LayerKind(name, *limits.get(name, ())) for name in names]

    def masks(self, of_kind: Callable[[LayerKind], Tensor]) -> Mask:
        """Make a mask for each layer kind with `of_kind`; return them by name, or just one if the model takes one."""
        masks = {kind.name: of_kind(kind) for kind in self.kinds}
        return masks if self.is_dict else next(iter(masks.values()))


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
