"""What the formats of decoder layers share: their description, vocabularies, and copies of the backbone's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from medusa.backbone import usual_layers
from medusa.checkpoints.checkpoint import Checkpoint, Tensors
from medusa.errors import RequestError
from medusa.export.base import Export, read_embeddings, read_lm_head
from medusa.files import Json
from medusa.heads.eagle_layer import LayerSizes
from medusa.loading import head_sizes, load_config

MODEL_WEIGHTS = "model.safetensors"
"""The file of weights that all consumers load."""


def describe_layers(sizes: LayerSizes, backbone: PretrainedConfig, model_type: str = "llama") -> Json:
    """Return the keys of `config.json` that describe decoder layers as a model of this type."""
    return {
        "model_type": model_type,
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["width"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["key_value_heads"],
        "head_dim": sizes["head_size"],
        "hidden_act": "silu",
        "rms_norm_eps": sizes["eps"],
        "rope_theta": sizes["rope"]["rope_theta"],
        "rope_parameters": sizes["rope"],
        "max_position_embeddings": getattr(backbone, "max_position_embeddings", None) or 2048,
        "vocab_size": backbone.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def speculators_config(export: Export, algorithm: str) -> Json:
    """Return the key of the speculators library that names the backbone and the number of guesses."""
    method = {"proposal_type": "greedy", "speculative_tokens": export.heads.config.num_heads}
    verifier = load_config(export.backbone, export.load)
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
        "verifier": {"name_or_path": export.backbone, "architectures": verifier.architectures or []},
    }


def backbone_and_features(export: Export) -> tuple[PretrainedConfig, list[int]]:
    """Return the config of the backbone, and the layers that the heads read; none if they read the last hidden state.

    Raise RequestError if the heads belong to a backbone of other sizes."""
    config = export.heads.config
    backbone = load_config(export.backbone, export.load).get_text_config(decoder=True)
    if backbone.hidden_size != head_sizes(backbone)[0]:
        raise RequestError(
            f"{export.backbone} projects its hidden states, which no server's layer reads; decode with this package"
        )
    if backbone.hidden_size != config.hidden_size or config.vocab_size not in (None, backbone.vocab_size):
        raise RequestError(f"these heads do not fit {export.backbone}, which has other sizes; name the right backbone")
    features, count = config.feature_layers or [], backbone.num_hidden_layers
    if isinstance(features, str):
        features = list(usual_layers(count))
    if not all(0 <= layer < count for layer in features):
        raise RequestError(f"these heads read the layers {features}, and {export.backbone} has {count}")
    return backbone, features


def vocabulary_maps(heads: Checkpoint, vocab_size: int) -> Tensors:
    """Return the maps `d2t` and `t2d` of a reduced vocabulary; none without one."""
    if heads.config.vocabulary is None:
        return {}
    tokens = heads.tensors["vocabulary"]
    known = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def with_lm_head(heads: Checkpoint, export: Export) -> Checkpoint:
    """Return heads with one LM head in their file: their own, or a copy of the backbone's."""
    if heads.config.lm_head == "one":
        return heads
    rows = read_lm_head(export.backbone, export.load)
    own = replace(heads.config, lm_head="one", vocab_size=len(rows))
    if heads.config.vocabulary is not None:
        rows = rows[heads.tensors["vocabulary"]]
    copies = {"lm_heads": rows.to(heads.dtype).T[None].contiguous()}
    return replace(heads, config=own, tensors=heads.tensors | copies)


def with_embeddings(heads: Checkpoint, export: Export) -> Checkpoint:
    """Return heads with input embeddings in their file: their own, or a copy of the backbone's."""
    settings: Any = heads.config.own  # of kind eagle or dflash, which both have this setting
    if settings.embeddings == "own":
        return heads
    rows = read_embeddings(export.backbone, export.load).to(heads.dtype).contiguous()
    own = replace(heads.config, vocab_size=len(rows), own=replace(settings, embeddings="own"))
    return replace(heads, config=own, tensors=heads.tensors | {"embedding.weight": rows})


def absolute(place: Path) -> Path:
    """Return the absolute path of an export, because a server may start in another folder than the export command."""
    return place.resolve()
