"""Checks of options that cannot be combined with heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationConfig

MODEL_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}


def require(holds: object, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def require_supported(config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise ValueError if an option or input that `generate` prepared cannot be combined with heads."""
    mode = config.get_generation_mode().value
    require(mode in ("greedy_search", "sample"), f"{mode.replace('_', ' ')} cannot be combined with heads")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        require(not getattr(config, name, None), f"{name} is not available with heads; leave it out")
    cache = model_kwargs.get("past_key_values")
    require(cache is None or cache.get_seq_length() == 0, "past_key_values hold text already; give it as input_ids")
    for name, value in model_kwargs.items():
        require(
            not isinstance(value, Tensor) or name in MODEL_INPUTS,
            f"the model input {name} is not supported with heads; only text can be continued",
        )
