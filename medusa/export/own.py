"""The backbone's LM head, for forms that know no heads without one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from medusa.checkpoints.stored import Stored
from medusa.errors import RequestError
from medusa.export import Export
from medusa.heads.independent import MedusaHeads
from medusa.loading import DEMO, LoadOptions, load_backbone, load_config

FORMER_NAMES = ("embed_out.weight",)  # under which transformers still saves an LM head


def with_own_lm_heads(export: Export) -> MedusaHeads:
    """`export.heads`, with copies of the backbone's LM head where they share it, in the heads' dtype.

    Raises:
        RequestError: the backbone's LM head cannot be read, or is of another size.
    """
    heads = export.heads
    if heads.lm_heads is not None:
        return heads
    weight, config = export.lm_head(), heads.config
    if weight.shape[1] != config.hidden_size or config.vocab_size not in (None, len(weight)):
        raise RequestError(
            f"these heads are for {config.vocab_size or 'any number of'} tokens and hidden size {config.hidden_size}, "
            f"the LM head of {export.backbone} for {len(weight)} and {weight.shape[1]}; name their own backbone"
        )
    with torch.device("meta"):
        own = MedusaHeads(replace(config, lm_head="own", vocab_size=len(weight)))
    copies = weight.T.to(heads.dtype).expand(config.num_heads, -1, -1).contiguous()
    own.load_state_dict(heads.state_dict() | {"lm_heads": copies}, assign=True)
    return own.eval()


def read_lm_head(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Tensor:
    """The LM head [V, H] of a backbone: from a local folder that tensor alone, else with the whole model.

    Raises:
        RequestError: no such backbone, or an LM head with a bias, which heads of others do not have.
    """
    folder = DEMO if name == "demo" else Path(name)
    if folder.is_dir() and not (folder / "adapter_config.json").is_file():
        config = load_config(name, LoadOptions(trust_remote_code=trust_remote_code))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        weight = _without_bias(model.get_output_embeddings(), name)
        text = config.get_text_config(decoder=True)
        tied = model.get_input_embeddings().weight if getattr(text, "tie_word_embeddings", False) else None
        names = [
            key for key, value in model.named_parameters(remove_duplicate=False) if value is weight or value is tied
        ]
        stored = Stored.of_model(folder)
        for key in (*names, *(key.removeprefix(f"{model.base_model_prefix}.") for key in names), *FORMER_NAMES):
            if key in stored and stored[key].shape == weight.shape:
                return stored[key]
    options = LoadOptions(device="cpu", revision=revision, trust_remote_code=trust_remote_code)
    model = load_backbone(name, options).model
    return _without_bias(model.get_output_embeddings(), name).detach()


def _without_bias(head: nn.Module | None, name: str) -> Tensor:
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        raise RequestError(f"{name} has no LM head; name the backbone that the heads were trained for")
    if getattr(head, "bias", None) is not None:
        raise RequestError(f"the LM head of {name} has a bias, which LM heads of this format cannot have")
    return weight
