"""A check that heads belong to the backbone that the user names for an export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.stored import Stored
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.export.base import is_whole_model, stored_weights
from medusa.fingerprint import differs, embedding_sample, unlike, weight_sample
from medusa.loading import DEMO, LoadOptions, head_sizes, load_backbone, load_config, on_meta
from medusa.options import DTYPE_NAMES
from medusa.places import SHIPPED, may_be_on_hub


def require_own_backbone(heads: Checkpoint, name: str, options: LoadOptions, is_named: bool = True) -> str | None:
    """Compare a backbone with the sizes and the fingerprint in the config of heads.

    `is_named`: --backbone names it; otherwise the heads do, and it may have changed since. Return why the weights could
    not be compared, or `None` if they were. Weights are compared if the backbone is a local folder or in the Hub's
    cache; nothing is downloaded. Raise RequestError if it is another backbone."""
    config, folder = heads.config, _local_place(name, options)
    recipe = (heads.provenance or {}).get("config") or {}
    said = f"--backbone {name}" if is_named else name
    way_out = _way_out(config.backbone, name, is_named, bool(recipe.get("adapter")))
    if folder is None:
        return f"{name} is not on this machine, so this export does not check that the heads belong to it"
    try:
        backbone = load_config(str(folder), options)
    except RequestError as error:
        if is_named:
            raise
        return f"this export does not check that the heads belong to {name}: {error}"
    hidden_size, vocab_size = head_sizes(backbone)
    if hidden_size != config.hidden_size or config.vocab_size not in (None, vocab_size):
        sizes = f"hidden size {config.hidden_size} and {config.vocab_size or 'any number of'} tokens"
        found = f"hidden size {hidden_size} and {vocab_size} tokens"
        raise RequestError(f"{said} has {found}, and these heads need {sizes}; {way_out}")
    if config.backbone.get("quantization") or recipe.get("quantization"):
        return f"the heads record quantised weights, which cannot be compared with those of {name}"
    if not (config.backbone.get("weights") or config.backbone.get("embedding")):
        return f"the heads do not record their backbone's weights, so this export cannot compare them with {name}"
    if _differs(folder, backbone, config.backbone, options, loads=is_named):
        trained_for = f", {config.backbone.get('name') or 'another one'}" if is_named else ""
        raise RequestError(f"{said} has other weights than the backbone of these heads{trained_for}; {way_out}")
    return None


def _way_out(known: Fingerprint, name: str, is_named: bool, has_adapter: bool) -> str:
    if has_adapter:
        return "they were trained with an adapter; add --backbone, with its folder or the merged model"
    if not is_named:
        return f"add --backbone, with a copy of {name} as it was"
    own = known.get("name")
    return "name the right backbone" if own in (None, name) else f"leave --backbone out, or name a copy of {own}"


def _local_place(name: str, options: LoadOptions) -> Path | None:
    """Return the folder or file of a backbone on this machine, also in the Hub's cache; `None` if it is not here."""
    if name == SHIPPED or Path(name).exists():
        return DEMO if name == SHIPPED else Path(name)
    if not may_be_on_hub(name):
        return None
    config = try_to_load_from_cache(name, "config.json", revision=options.revision)
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and len(Stored.of_model(folder)) else None


def _differs(folder: Path, config: PretrainedConfig, known: Fingerprint, options: LoadOptions, loads: bool) -> bool:
    """Whether the model in a folder is not the backbone of `known`. Reads single tensors of its files where it can.

    Elsewhere (adapters, GGUF files) it compares only if it `loads` the whole model, which may take much memory."""
    if is_whole_model(folder) and getattr(config, "quantization_config", None) is None:
        model = on_meta(config, options)
        if (tensors := stored_weights(Stored.of_model(folder), model)) is not None:
            if known.get("weights"):
                return unlike(known["weights"], weight_sample(tensors, tensors.__getitem__))
            embedding = model.get_input_embeddings().weight
            name = next(key for key, value in model.named_parameters() if value is embedding)
            return unlike(known["embedding"], embedding_sample(tensors[name]))
    if not loads:
        return False
    dtype = known.get("dtype")
    loaded = load_backbone(str(folder), replace(options, device="cpu", dtype=dtype if dtype in DTYPE_NAMES else None))
    return differs(loaded.model, known)
