"""The formats that `medusa export` writes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from medusa.errors import RequestError

if TYPE_CHECKING:
    from medusa.export.base import Export, Written

FORMATS = {
    "original-v1": "medusa.export.original:write",  # FasterDecoding's medusa_lm_head.pt
    "tgi": "medusa.export.tgi:write",  # Text Generation Inference, LoRAX
    "vllm": "medusa.export.vllm:write",  # vLLM: Medusa heads up to 0.32, EAGLE-3's layer
    "sglang": "medusa.export.sglang:write",  # SGLang: EAGLE-3's layer
    "tensorrt-llm": "medusa.export.tensorrt_llm:write",  # heads without the backbone
    "modelopt": "medusa.export.modelopt:write",  # heads and backbone in one folder, as TensorRT-LLM takes them
    "hub": "medusa.export.hub:write",  # plain transformers, through custom_generate
}


def writer(name: str) -> Callable[[Export], Written]:
    """The function that writes a format. It checks that the format can hold the heads before it writes anything."""
    if name not in FORMATS:
        raise RequestError(f"--to is {name!r}; choose one of {', '.join(FORMATS)}")
    module, _, function = FORMATS[name].partition(":")
    found: Callable[[Export], Written] = getattr(import_module(module), function)
    return found
