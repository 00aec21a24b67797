"""Read heads in any format; the format is recognised from the files and the names of their tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from medusa.checkpoints.checkpoint import Checkpoint, Tensors, empty, require_exactly, require_vocabulary
from medusa.checkpoints.eagle3 import from_eagle3, is_eagle3
from medusa.checkpoints.find import HubOptions, find_folder, stored_heads
from medusa.checkpoints.hydra import from_original
from medusa.checkpoints.layout import CONFIG, HYDRA_WEIGHTS, PROVENANCE
from medusa.checkpoints.names import PUBLISHED, Found, find
from medusa.checkpoints.published import from_published
from medusa.checkpoints.stored import Stored
from medusa.config import MedusaConfig
from medusa.errors import RequestError
from medusa.files import Json, read_json


def load(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> Checkpoint:
    """Read heads from `demo`, a local folder or a Hub id.

    Raises:
        RequestError: no heads there, a damaged file, or tensors that are missing, unknown or of the wrong shape.
    """
    folder = find_folder(name_or_path, **hub)
    stored = stored_heads(folder)
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict):
        raise RequestError(f"{folder / CONFIG} holds no JSON object")
    source = str(stored.paths[0] if len(stored.paths) == 1 else folder)
    if stored.paths and stored.paths[0].name == HYDRA_WEIGHTS:
        checkpoint = _checked(*from_original(dict(stored), published, source), source)
    elif "kind" in published:  # ours
        checkpoint = _from_ours(dict(stored), published, source)
    elif is_eagle3(stored):
        checkpoint = _checked(*from_eagle3(stored, published, source), source)
    else:
        checkpoint = _from_others(stored, published, source, str(name_or_path))
    checkpoint.provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else None
    return checkpoint


def _from_ours(tensors: Tensors, published: Json, source: str) -> Checkpoint:
    """Heads that `medusa.checkpoints.save` wrote: in the published format, or under the names of their modules."""
    if published["kind"] == "medusa" and not published.get("prefix_layers") and not published.get("vocabulary"):
        return from_published(Found(tensors), published, source)
    try:
        config = MedusaConfig.from_dict(published)
    except TypeError:
        raise RequestError(f"{source}: its {CONFIG} does not say what these heads are") from None
    return _checked(config, tensors, source)


def _from_others(stored: Stored, published: Json, source: str, asked: str) -> Checkpoint:
    """Heads by others' names, alone or inside the model `asked`; `published` is the config of the same folder."""
    found = find(stored, published, source)
    if found.names is not PUBLISHED or found.prefix:  # a config of something else, whose keys may mean something else
        published = {key: published[key] for key in ("base_model_name_or_path", "vocab_size") if key in published}
    if found.prefix and len(found.tensors) < len(stored):  # inside the backbone that they belong to
        published["base_model_name_or_path"] = asked
    return from_published(found, published, source)


def _checked(config: MedusaConfig, tensors: Tensors, source: str) -> Checkpoint:
    """Heads from tensors by our names, after a check that these are all."""
    require_exactly(tensors, empty(config).tensors, source)
    if config.vocabulary is not None:
        require_vocabulary(tensors["vocabulary"], config, source)
    return Checkpoint(config, tensors)
