"""A small model beside the backbone, with the same tokenizer: one that drafts, or an amateur to be contrasted with."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from decode.draft import DrafterContext
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import ASSETS
from medusa.loading import LoadOptions, load_backbone


def companion_path(name: str) -> str:
    """Where a small model is; `demo` is the one that comes along."""
    return str(ASSETS / "draft") if name == "demo" else name


def load_companion(name: str, materials: DrafterContext, role: str = "draft model") -> PreTrainedModel:
    """The model called `name`, in the backbone's dtype and on its device; `role` is what messages call it.

    Raises:
        RequestError: no such model, or one of another vocabulary or tokenizer."""
    backbone = Backbone(materials.model)
    dtype, device = str(backbone.dtype).removeprefix("torch."), str(backbone.device)
    options = LoadOptions(dtype, device, trust_remote_code=materials.trust_remote_code)
    loaded = load_backbone(companion_path(name), options)
    require_same_vocabulary(name, loaded.model.config, materials.model.config, role)
    require_same_tokenizer(name, loaded.tokenizer, materials.tokenizer, materials.name, role)
    return loaded.model


def require_same_vocabulary(
    name: str, theirs: PretrainedConfig, ours: PretrainedConfig, role: str = "draft model"
) -> None:
    """Raises:
    RequestError: the small model has another number of tokens."""
    small, backbone = (config.get_text_config(decoder=True).vocab_size for config in (theirs, ours))
    if small != backbone:
        raise RequestError(
            f"the {role} {name} has {small} tokens and the backbone {backbone}; give one of the same vocabulary"
        )


def require_same_tokenizer(name: str, theirs: Any, ours: Any, backbone: str, role: str = "draft model") -> None:
    """Raises:
    RequestError: both have a tokenizer, and one word is not the same id in both."""
    if theirs is None or ours is None:
        return
    small, large = theirs.get_vocab(), ours.get_vocab()
    for word in sorted(large.keys() | small.keys()):
        if small.get(word) != large.get(word):
            raise RequestError(
                f"the {role} {name} has another tokenizer: {word!r} is {_number(large, word)} in "
                f"{backbone} and {_number(small, word)} in {name}"
            )


def _number(vocabulary: dict[str, int], word: str) -> str:
    return str(vocabulary[word]) if word in vocabulary else "nothing"
