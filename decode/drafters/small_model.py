"""Loading of small models with the backbone's tokenizer: draft models, and amateurs of contrastive decoding."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from decode.drafters.base import DrafterContext
from medusa.backbone import Backbone
from medusa.errors import RequestError
from medusa.files import ASSETS
from medusa.loading import LoadOptions, load_backbone
from medusa.options import dtype_name


def small_model_path(name: str) -> str:
    """The folder or Hub id of the small model `name`; `demo` is the draft model that comes with the package."""
    return str(ASSETS / "draft") if name == "demo" else name


def load_small_model(name: str, context: DrafterContext, role: str = "draft model") -> PreTrainedModel:
    """Load the model `name` in the backbone's dtype and on its device; error messages call the model `role`.

    Raise a `RequestError` if there is no such model, or if its vocabulary or tokenizer is not the backbone's."""
    backbone = Backbone(context.model)
    dtype, device = dtype_name(backbone.dtype), str(backbone.device)
    options = LoadOptions(dtype, device, trust_remote_code=context.trust_remote_code)
    loaded = load_backbone(small_model_path(name), options)
    require_same_vocabulary(name, loaded.model.config, context.model.config, role)
    require_same_tokenizer(name, loaded.tokenizer, context.tokenizer, context.name, role)
    return loaded.model


def require_same_vocabulary(name: str, small: PretrainedConfig, backbone: PretrainedConfig, role: str) -> None:
    """Raise a `RequestError` if the small model and the backbone differ in vocabulary size."""
    own, other = (config.get_text_config(decoder=True).vocab_size for config in (small, backbone))
    if own != other:
        problem = f"the {role} {name} has {own} tokens and the backbone {other}"
        raise RequestError(f"{problem}; give one with the same vocabulary")


def require_same_tokenizer(
    name: str, small: Tokenizer | None, backbone: Tokenizer | None, backbone_name: str, role: str = "draft model"
) -> None:
    """Raise a `RequestError` if two tokenizers give a token different ids. If one is `None`, nothing is checked."""
    if small is None or backbone is None:
        return
    ids, backbone_ids = small.get_vocab(), backbone.get_vocab()
    for token in sorted(backbone_ids.keys() | ids.keys()):
        if ids.get(token) != backbone_ids.get(token):
            raise RequestError(
                f"the {role} {name} has another tokenizer: {token!r} is {backbone_ids.get(token, 'nothing')} in "
                f"{backbone_name} and {ids.get(token, 'nothing')} in {name}; give a model with the same tokenizer"
            )
