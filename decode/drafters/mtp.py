"""The MTP layer that comes with a model drafts a tree: one layer runs once for each level (`medusa.heads.mtp`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from decode.drafters.base import DrafterContext, DrafterFactory, require_at_least
from decode.drafters.trained_heads import HeadsDrafterConfig
from medusa.heads.independent import MedusaHeads
from medusa.native_layers import native_config, native_heads


@dataclass(frozen=True)
class MtpConfig(HeadsDrafterConfig):
    """`--drafter mtp`: the model's own layer for multi-token prediction drafts a tree. Nothing is trained."""

    tokens: int = 3  # tokens to draft on a path, each by one run of the layer; the most levels of `--tree`

    first = "tokens"
    needs = "a model with an MTP layer"
    needs_heads = False

    def __post_init__(self) -> None:
        require_at_least(1, "mtp", tokens=self.tokens)

    def own_heads(self, model: PreTrainedModel) -> MedusaHeads:
        return native_heads(model, self.tokens)

    def planned_heads(self, config: PretrainedConfig) -> MedusaHeads:
        with torch.device("meta"):
            return MedusaHeads.from_config(native_config(config, self.tokens))

    def factory(self, context: DrafterContext) -> DrafterFactory:
        return super().factory(context._replace(heads=self.own_heads(context.model)))
