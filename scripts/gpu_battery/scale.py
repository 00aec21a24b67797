"""The sizes of everything that the battery measures; the values are in scale.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

Shape = dict[str, int]
Options = dict[str, object]


@dataclass(frozen=True)
class Scale:
    """Sizes of everything."""

    curve_shape: Shape
    """A Llama with random weights, whose steps are timed."""
    kv_heads: dict[str, int]
    """KV heads of the models that are timed: one without and one with grouped queries."""
    contexts: list[int]
    batches: list[int]
    nodes: list[int]
    """Sizes of trees, the most important one first; 1 is plain decoding."""
    steps: int
    """Timed steps for each point of a curve."""
    losses: Shape
    loss_positions: list[int]
    backbone: str
    """Options of make_backbone."""
    source_bytes: int
    """Python sources to train the backbone on."""
    texts: int
    """Texts that the backbone writes for its heads."""
    first_heads: Options
    """Training of the first heads, which most stages use."""
    other_heads: Options
    prompt_tokens: int
    prompts: int
    new_tokens: int
    rounds: int
    draws: int
    sampled_prompts: int
    """Prompts that `medusa verify` draws from."""
    trees: dict[str, str]
    """Trees that benchmarks decode with, by the name in the report."""


SIZES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
FULL, TOY = Scale(**SIZES["full"]), Scale(**SIZES["toy"])
