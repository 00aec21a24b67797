"""The multi-token prediction (MTP) layers that come with a model: whether it has one, and heads made from it.

transformers drops these layers when it loads a model, and `MtpModel.from_pretrained` loads them from the same files."""

from __future__ import annotations

import copy
import json
import weakref

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, modeling_layers

from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.errors import RequestError, first_line
from medusa.files import Json
from medusa.fingerprint import fingerprint
from medusa.heads import NATIVE
from medusa.heads.independent import MedusaHeads
from medusa.loading import head_sizes

IGNORED = "_keys_to_ignore_on_load_unexpected"  # the attribute with the names of tensors that a model ignores
SINCE = "5.17"  # the first version of transformers with `MtpModel` that this package supports

# For each model in memory, heads with its MTP layer, so that the layer is read once.
_HEADS = weakref.WeakKeyDictionary[PreTrainedModel, MedusaHeads]()


def native_config(config: PretrainedConfig, num_heads: int) -> MedusaConfig:
    """Return the config of `num_heads` heads of kind `mtp`, whose layer comes with a model of this `config`.

    Raise RequestError if the model has no MTP layer, or if transformers is too old to load it."""
    if not hasattr(modeling_layers, "MtpModel"):
        found = f"transformers {transformers.__version__} loads no MTP layers"
        raise RequestError(f"{found}; install transformers {SINCE} or newer, or choose another drafter")
    text = config.get_text_config(decoder=True)
    if not getattr(text, "num_mtp_layers", None):
        lacks = f"a model of type {text.model_type} without num_mtp_layers in its config has no MTP layers"
        raise RequestError(f"{lacks}; train heads (heads.kind=eagle), or choose another drafter, such as ngram")
    content: Json = json.loads(text.to_json_string())
    for key in ("architectures", "transformers_version", "_name_or_path"):
        content.pop(key, None)
    hidden_size, vocab_size = head_sizes(config)
    return MedusaConfig(hidden_size, vocab_size, num_heads, kind=NATIVE, block=NATIVE, lm_head="shared", mtp=content)


def native_heads(model: PreTrainedModel, num_heads: int) -> MedusaHeads:
    """Return `num_heads` heads whose layer is the first MTP layer of `model`, in eval mode and on the LM head's device.

    Heads of one model share their weights. Raise RequestError if the model has no MTP layer, or its files hold none."""
    config = native_config(model.config, num_heads)
    config.base_model_name_or_path = model.config.name_or_path
    config.backbone = fingerprint(model)
    device = Backbone(model).head_weight.device
    with torch.device("meta"):
        heads = MedusaHeads.from_config(config)
    held = _HEADS.get(model)
    tensors = read_layer(model, device) if held is None else held.state_dict()
    heads.load_state_dict(tensors, assign=True)
    _HEADS[model] = heads.eval().to(device)
    return heads


def read_layer(model: PreTrainedModel, device: torch.device) -> dict[str, Tensor]:
    """Read the first MTP layer of `model` from the model's files; return its tensors as `MtpHeads` names them.

    Raise RequestError if the model was not loaded from files, or if they hold no complete layer."""
    name = model.config.name_or_path
    try:
        layers = modeling_layers.MtpModel.from_pretrained(_naming_layers(model), device_map={"": device})
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # a missing tensor is a RuntimeError
        found = f"the files of {name} hold no MTP layer" if name else "a model that was not loaded has no MTP layer"
        raise RequestError(f"{found} ({first_line(error)}); choose another drafter, such as ngram") from error
    return {f"layer.{key}": tensor for key, tensor in layers.layers[0].state_dict().items()}


def _naming_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Let transformers find the MTP layers in the files of `model`, whatever the number of the model's layers.

    It looks for the tensors that the model's class ignores. Most classes name a layer by its number in the largest
    model, such as 61, so that the layers of smaller models would not be found. The result is a copy of the model that
    shares all of its parts; the model itself is not changed."""
    text, named = model.config.get_text_config(decoder=True), copy.copy(model)
    first = text.num_hidden_layers
    numbers = "|".join(map(str, range(first, first + text.num_mtp_layers)))
    setattr(named, IGNORED, [*(getattr(model, IGNORED) or ()), rf"(^|\.)layers\.({numbers})\."])
    return named
