"""The formats of heads that `medusa export` writes for other programs."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from medusa.errors import RequestError

if TYPE_CHECKING:
    from medusa.export.base import Export, Written

FORMATS = {
    "original-v1": "published:write_original",  # FasterDecoding's medusa_lm_head.pt
    "tgi": "published:write_tgi",  # Text Generation Inference, LoRAX
    "vllm": "vllm:write_vllm",  # vLLM: Medusa heads up to 0.32, EAGLE-3's layer
    "sglang": "vllm:write_sglang",  # SGLang: EAGLE-3's layer
    "tensorrt-llm": "published:write_tensorrt_llm",  # heads without the backbone
    "modelopt": "published:write_modelopt",  # heads and backbone in one folder, as TensorRT-LLM takes them
    "hub": "repository:write_hub",  # plain transformers, through custom_generate
}
"""The module and the function that writes each format."""


def writer(name: str) -> Callable[[Export], Written]:
    """The function that writes a format. It checks that the format can hold the heads before it writes anything."""
    if name not in FORMATS:
        raise RequestError(f"--to is {name!r}; choose one of {', '.join(FORMATS)}")
    found: Callable[[Export], Written] = resolve_name(f"medusa.export.{FORMATS[name]}")
    return found
