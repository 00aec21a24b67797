"""Checks of a model's config: whether the model can verify a tree of tokens in one forward.

This file is also a part of the decoder in Hub repositories (`medusa.export.hub_code`). So it imports nothing from this
package.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

TREE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""The types of layers that accept a tree mask."""
MASK_BLIND = {
    "gpt_neo": "its local attention uses a window of its own by slot index and ignores ours",
    "mpt": "its ALiBi biases follow slot indices, not positions",
    "bloom": "its ALiBi biases follow slot indices, not positions",
}
"""Model types whose attention does not follow a tree mask, with the reason (measured).

The test of logits does not find them: GPT-Neo's window is longer than the tested text, and half precision hides the
biases of MPT.
"""


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of the text decoder, which is a part of the config of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def longrope_boundary(model: PreTrainedModel) -> int | None:
    """Return the text length at which RoPE scaling of type `longrope` changes all rotations; `None` for other models.

    Scaling of type `dynamic` changes all rotations, too, but only after the end of the context, where decoding stops.
    """
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several types of layers have separate parameters for each type.
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    ends = [
        kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(ends, default=None)


def why_no_tree(model: PreTrainedModel) -> str | None:
    """Return the reason why the model cannot verify a tree in one forward; `None` if the config shows no reason."""
    config = text_config(model)
    unfit = set(getattr(config, "layer_types", None) or ()) - TREE_LAYERS
    attention = getattr(config, "_attn_implementation", None) or ""
    if model.config.is_encoder_decoder:
        return "encoder-decoder models are not supported"
    if getattr(model, "_is_stateful", False) or unfit:
        named = ", ".join(sorted(unfit)) or "recurrent"
        return f"its layers ({named}) keep a state that cannot branch, or choose by themselves what to see"
    if config.model_type in MASK_BLIND:
        return MASK_BLIND[config.model_type]
    if getattr(config, "alibi", False):
        return "its ALiBi biases follow slot indices, not positions"
    if any(name in attention for name in ("flash", "flex", "paged")):
        return f"attention {attention!r} takes no tree mask; load it with sdpa or eager (--attention sdpa)"
    return None
