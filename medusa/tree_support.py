"""Properties of a model's config that decide whether the model can verify a tree.

The decoder in Hub repositories includes this file (`medusa.export.hub_code`), so it imports nothing from the package.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

TREE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
MASK_BLIND = {
    # model_type: why attention ignores a tree mask or needs more than one (measured). A test by logits misses them:
    # GPT-Neo's window is longer than a quick test, and half precision hides MPT's biases.
    "gpt_neo": "its local attention uses a window of its own by slot index and ignores ours",
    "mpt": "its ALiBi biases follow slot indices, not positions",
    "bloom": "its ALiBi biases follow slot indices, not positions",
}


def text_config(model: PreTrainedModel) -> Any:
    """The config of the model's language part."""
    return model.config.get_text_config(decoder=True)


def longrope_boundary(model: PreTrainedModel) -> int | None:
    """The number of tokens after which `longrope` changes the rotations of all positions; `None` without longrope.

    (`dynamic` also changes them, but only after the context's end, where decoding stops.)
    """
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each.
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    ends = [
        kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(ends, default=None)


def why_no_tree(model: PreTrainedModel) -> str | None:
    """The reason why the model cannot verify a tree in one forward; `None` if its config shows none."""
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
