"""Export of heads for other programs: the formats that `medusa export` can write."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from medusa.errors import RequestError

if TYPE_CHECKING:
    from medusa.export.base import Export, Written

FORMATS = {
    "original-v1": "published:write_original",  # FasterDecoding's package medusa-llm
    "tgi": "published:write_tgi",  # Text Generation Inference, LoRAX
    "vllm": "vllm:write",  # Medusa heads (vLLM up to 0.32) and the layer of EAGLE-3
    "sglang": "eagle3:write_sglang",  # the layer of EAGLE-3
    "tensorrt-llm": "tensorrt_llm:write",  # TensorRT-LLM: heads without the backbone
    "modelopt": "tensorrt_llm:write_modelopt",  # TensorRT-LLM: heads and backbone in one folder
    "hub": "repository:write",  # transformers without this package, through custom_generate
}
"""The name of each format, with the module and the function that write it."""


def writer(name: str) -> Callable[[Export], Written]:
    """Return the function that writes heads in the format `name`; raise RequestError if there is no such format."""
    if name not in FORMATS:
        raise RequestError(f"--to is {name!r}; choose one of {', '.join(FORMATS)}")
    found: Callable[[Export], Written] = resolve_name(f"medusa.export.{FORMATS[name]}")
    return found
