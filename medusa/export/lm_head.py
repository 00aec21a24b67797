"""Reading of the backbone's LM head, for export formats in which each Medusa head has a separate LM head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.stored import Stored
from medusa.errors import RequestError
from medusa.export.base import Export
from medusa.loading import DEMO, LOAD_DEFAULTS, LoadOptions, load_backbone, load_config

FORMER_NAMES = ("embed_out.weight",)
"""Older names of the LM head's weight, under which transformers still saves it for some models."""


def with_own_lm_heads(export: Export) -> Checkpoint:
    """Return heads that each have an LM head: their own, or a copy of the backbone's.

    Raise RequestError if heads that share the backbone's LM head do not fit it."""
    heads, config = export.heads, export.heads.config
    if config.lm_head == "own":
        return heads
    weight = export.lm_head()
    if weight.shape[1] != config.hidden_size or config.vocab_size not in (None, len(weight)):
        raise RequestError(
            f"these heads are for {config.vocab_size or 'any number of'} tokens and hidden size {config.hidden_size}, "
            f"the LM head of {export.backbone} for {len(weight)} and {weight.shape[1]}; name the right backbone"
        )
    copies = weight.T.to(heads.dtype).expand(config.num_heads, -1, -1).contiguous()
    own = replace(config, lm_head="own", vocab_size=len(weight))
    return replace(heads, config=own, tensors=heads.tensors | {"lm_heads": copies})


def read_lm_head(name: str, options: LoadOptions = LOAD_DEFAULTS) -> Tensor:
    """Read a backbone's LM head [V, H] (V tokens, hidden size H); from a local folder, without the rest of the model.

    Raise RequestError if there is no such backbone, or its LM head has a bias, which no export format can store."""
    folder = DEMO if name == "demo" else Path(name)
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        config = load_config(name, options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
        weight = _without_bias(model.get_output_embeddings(), name)
        text = config.get_text_config(decoder=True)
        tied = model.get_input_embeddings().weight if getattr(text, "tie_word_embeddings", False) else None
        parameters = model.named_parameters(remove_duplicate=False)
        names = [name for name, value in parameters if value is weight or value is tied]
        stored = Stored.of_model(folder)
        for key in (*names, *(name.removeprefix(f"{model.base_model_prefix}.") for name in names), *FORMER_NAMES):
            if key in stored and stored[key].shape == weight.shape:
                return stored[key]
    model = load_backbone(name, replace(options, device="cpu")).model
    return _without_bias(model.get_output_embeddings(), name).detach()


def _without_bias(head: nn.Module | None, name: str) -> Tensor:
    """Return the weight [V, H] of a model's LM head (V tokens, hidden size H); raise RequestError if it has a bias."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise RequestError(f"{name} has no LM head; name the backbone that the heads were trained for")
    if getattr(head, "bias", None) is not None:
        raise RequestError(f"the LM head of {name} has a bias, which LM heads of this format cannot have")
    return weight
