"""The multi-token prediction (MTP) layers that come with a model: whether it has one, and heads made from it.

transformers drops these layers when it loads a model, and `MtpModel.from_pretrained` loads them from the same files."""

from __future__ import annotations

import copy
import json
import re
import weakref
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, modeling_layers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from medusa.backbone import Backbone
from medusa.config import MedusaConfig
from medusa.errors import RequestError, first_line
from medusa.files import Json, read_json
from medusa.fingerprint import fingerprint
from medusa.heads import NATIVE
from medusa.heads.independent import MedusaHeads
from medusa.loading import head_sizes

IGNORED = "_keys_to_ignore_on_load_unexpected"  # the attribute with the names of tensors that a model ignores
SINCE = "5.17"  # the first version of transformers with `MtpModel` that this package supports


@dataclass(frozen=True)
class Layout:
    """How checkpoints of a model type store an MTP layer that the type's config and class do not describe."""

    prefix: str
    """How the names of the tensors begin."""
    settings: Json
    """What transformers must find in the config: which of its kinds of layers the MTP layer is."""
    names: dict[str, str]
    """Patterns of names, as `MtpModel` reads them, and what replaces them; applied in this order."""
    count: str = "num_mtp_layers"
    """The config's key for the number of layers. Some checkpoints have no such key, but a layer."""

    @property
    def tensors(self) -> str:
        """A pattern of the names of the first layer's tensors, and of those that all layers share."""
        return rf"^{re.escape(self.prefix)}(?!layers\.[1-9])"


BLOCK = {r"^layers\.0\.(?!mtp_block\.|enorm\.|hnorm\.|eh_proj\.|post_norm\.)": "layers.0.mtp_block."}
QWEN = Layout(
    "mtp.",
    {"mtp_layer_types": ["full_attention"]},
    BLOCK
    | {
        r"^fc\.": "layers.0.eh_proj.",
        r"^pre_fc_norm_embedding\.": "layers.0.enorm.",
        r"^pre_fc_norm_hidden\.": "layers.0.hnorm.",
        r"^norm\.": "layers.0.post_norm.",
    },
    "mtp_num_hidden_layers",
)
MIMO = Layout(
    "model.mtp.",
    {"mtp_layer_types": ["sliding_attention"], "mtp_mlp_layer_types": ["dense"]},
    BLOCK
    | {
        r"\.mtp_block\.final_layernorm\.": ".post_norm.",
        r"\.mtp_block\.pre_mlp_layernorm\.": ".mtp_block.post_attention_layernorm.",
    },
)
LAYOUTS = {"qwen3_next": QWEN, "qwen3_5_text": QWEN, "qwen3_5_moe_text": QWEN, "mimo_v2_flash": MIMO}
"""The layouts by the model type of the text decoder. Other layers are those that transformers reads by itself.

transformers removes the prefixes `model.` and `mtp.`. Fused experts, and experts one by one, are read as those of the
model. Sources: `qwen3_next_mtp.py` and `mimo_v2_mtp.py` of vLLM, and published lists of tensors."""

# For each model in memory, heads with its MTP layer, so that the layer is read once.
_HEADS = weakref.WeakKeyDictionary[PreTrainedModel, MedusaHeads]()


def native_config(config: PretrainedConfig, num_heads: int) -> MedusaConfig:
    """Return the config of `num_heads` heads of kind `mtp`, whose layer comes with a model of this `config`.

    Raise RequestError if the model has no MTP layer, or if transformers is too old to load it."""
    if not hasattr(modeling_layers, "MtpModel"):
        found = f"transformers {transformers.__version__} loads no MTP layers"
        raise RequestError(f"{found}; install transformers {SINCE} or newer, or choose another drafter")
    text = _described(config).get_text_config(decoder=True)
    if not getattr(text, "num_mtp_layers", None):
        layout = _layout(config)
        key = "num_mtp_layers" if layout is None else layout.count
        lacks = f"a model of type {text.model_type} without {key} in its config has no MTP layers"
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

    Raise RequestError if the model was not loaded from files, or if they hold no complete layer in plain weights."""
    name = model.config.name_or_path
    try:
        _check_names(model)
        layers = modeling_layers.MtpModel.from_pretrained(_naming_layers(model), device_map={"": device})
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError) as error:  # a missing tensor is a RuntimeError
        found = f"the files of {name} hold no MTP layer" if name else "a model that was not loaded has no MTP layer"
        raise RequestError(f"{found} ({first_line(error)}); choose another drafter, such as ngram") from error
    return {f"layer.{key}": tensor for key, tensor in layers.layers[0].state_dict().items()}


def _layout(config: PretrainedConfig) -> Layout | None:
    """Return the layout of the MTP layer of a model with this `config`; `None` if transformers knows the layer."""
    return LAYOUTS.get(config.get_text_config(decoder=True).model_type)


def _described(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config that tells transformers of the model's MTP layer: a changed copy, if the layer has a `Layout`."""
    if (layout := _layout(config)) is None:
        return config
    described = copy.deepcopy(config)
    text = described.get_text_config(decoder=True)
    number = getattr(text, layout.count, 1) or 0
    for key, value in (layout.settings | {"num_mtp_layers": min(number, 1)}).items():
        setattr(text, key, value)
    return described


def _naming_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Let transformers find the MTP layers in the files of `model`, by their layout or by the number of the layers.

    It looks for the tensors that the model's class ignores. Most classes name a layer by its number in the largest
    model, such as 61, so that the layers of smaller models would not be found. The result is a copy of the model that
    shares all of its parts; the model itself is not changed."""
    named: Any = copy.copy(model)
    if (layout := _layout(model.config)) is None:
        setattr(named, IGNORED, [*(getattr(model, IGNORED) or ()), _pattern(model.config)])
        return named
    named.config = _described(model.config)
    setattr(named, IGNORED, [_pattern(model.config)])
    # All conversions of the type: the model's own experts may be stored fused, and those of the MTP layer one by one.
    # Those of the text decoder, because the conversions of a multimodal model only hold below the decoder's prefix.
    named._weight_conversions = [
        *(WeightRenaming(source_patterns=old, target_patterns=new) for old, new in layout.names.items()),
        *get_model_conversion_mapping(model.get_decoder(), add_legacy=False),
    ]
    return named


def _pattern(config: PretrainedConfig) -> str:
    """A pattern of the names of the tensors of a model's MTP layers, by their layout or by the number of the layers."""
    if (layout := _layout(config)) is not None:
        return layout.tensors
    text = config.get_text_config(decoder=True)
    first = text.num_hidden_layers
    return rf"(^|\.)layers\.({'|'.join(map(str, range(first, first + text.num_mtp_layers)))})\."


def _check_names(model: PreTrainedModel) -> None:
    """Raise ValueError if the files of `model` lack the MTP layer of its `Layout`, or hold a quantised one.

    transformers would take the codes of quantised tensors for the weights."""
    names, layout = _tensor_names(model.config.name_or_path), _layout(model.config)
    own = [name for name in names if re.search(_pattern(model.config), name)]
    scales = [name for name in own if "scale" in name]
    if names and not own and layout is not None:  # a tensor that other layers lack is an error of transformers
        raise ValueError(f"the name of no tensor begins with {layout.prefix}")
    if scales:
        raise ValueError(f"its tensors are quantised, as {scales[0]} shows; load a checkpoint with plain ones")


def _tensor_names(place: str | None) -> Collection[str]:
    """List the names of the tensors of a model, in a folder or on the Hub; empty if it has no safetensors."""
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):  # in the order of transformers
        path = cached_file(place, name, **quiet) if place else None  # no place: a model that was not loaded
        if path is not None and name == SAFE_WEIGHTS_INDEX_NAME:
            return read_json(Path(path))["weight_map"]
        if path is not None:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
    return ()
