"""Loading and saving of heads: from local folders and the Hub in any format, and into folders in this project's format.

The names of the files and tensors show which format a folder has.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, Unpack

from medusa.checkpoints.checkpoint import Checkpoint, Tensors
from medusa.checkpoints.eagle3 import from_eagle3, is_eagle3
from medusa.checkpoints.hydra import from_hydra
from medusa.checkpoints.published import PREFIX, HeadTensors, from_others, from_published, is_of_heads, to_published
from medusa.checkpoints.stored import CONFIG, HEADS_FILES, HYDRA_WEIGHTS, PROVENANCE, WEIGHTS, Stored, save_tensors
from medusa.config import MedusaConfig
from medusa.errors import RequestError, first_line
from medusa.files import ASSETS, Json, read_json, require_absent, write_json

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
"""The form of a repository's id on the Hub: org/name."""
DEMO = ASSETS / "heads"
"""The folder of the heads that come with the package."""


class HubOptions(TypedDict, total=False):
    """The options of a download from the Hub. They go to `huggingface_hub.snapshot_download`."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool


def load(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> Checkpoint:
    """Load heads as `MedusaHeads.from_pretrained` does, but without a module."""
    folder = find_folder(name_or_path, **hub)
    stored = _stored_heads(folder)
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict):
        raise RequestError(f"{folder / CONFIG} holds no JSON object")
    paths = stored.paths
    source = str(paths[0] if len(paths) == 1 else folder)
    if paths and paths[0].name == HYDRA_WEIGHTS:
        checkpoint = from_hydra(dict(stored), published, source)
    elif "kind" in published:
        checkpoint = _from_own_format(dict(stored), published, source)
    elif is_eagle3(stored):
        checkpoint = from_eagle3(stored, published, source)
    else:
        checkpoint = from_others(stored, published, source, str(name_or_path))
    provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else None
    return replace(checkpoint, provenance=provenance)


def save(checkpoint: Checkpoint, folder: Path, overwrite: bool = True) -> None:
    """Write `config.json`, `medusa_lm_head.safetensors` and, if there is one, `provenance.json`, each file atomically.

    Tensors of independent heads get the names that servers read (`medusa.checkpoints.published`). Tensors of heads of
    other kinds, with prefix layers or with a reduced vocabulary keep their names in the state dict. If `folder`
    contains heads and `overwrite` is false, RequestError is raised.
    """
    require_absent(folder / WEIGHTS, overwrite)
    save_tensors(to_published(checkpoint), folder / WEIGHTS)
    write_json(folder / CONFIG, checkpoint.config.to_dict())
    if checkpoint.provenance is not None:
        write_json(folder / PROVENANCE, checkpoint.provenance)


def find_folder(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> Path:
    """Return the local folder of the heads with this name; download the heads if the name is a Hub id.

    Any other name raises RequestError.
    """
    name = str(name_or_path)
    if name == "demo":
        return DEMO
    if Path(name).is_dir():
        return Path(name)
    if not HUB_ID.fullmatch(name) or Path(name).parent.is_dir():
        raise RequestError(f"no heads at {name}: give a folder that exists, a Hub id such as org/name, or demo")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return _download(name, hub)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = first_line(error)
        raise RequestError(f"no heads at {name}: neither a local folder nor on the Hub ({reason})") from None


def _download(name: str, hub: HubOptions) -> Path:
    """Download those files of a Hub repository that can contain heads; return their local folder."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, allow_patterns=[*patterns], **hub))

    folder = fetch(CONFIG, PROVENANCE, *HEADS_FILES, "*.index.json")
    if any((folder / name).is_file() for name in HEADS_FILES):
        return folder
    if (indexed := Stored.of_index(folder)) is not None:
        inside = {path.name for tensor, path in indexed.places.items() if PREFIX.match(tensor)}
        return fetch(*sorted(inside or {path.name for path in indexed.paths}))
    fetch("*.safetensors")
    return folder if any(folder.glob("*.safetensors")) else fetch("*.bin")


def _stored_heads(folder: Path) -> Stored:
    """Return the tensors in a folder's file of heads or, without such a file, of its model with heads inside."""
    path = next((folder / name for name in HEADS_FILES if (folder / name).is_file()), None)
    if path is not None:
        return Stored.of_files([path])
    stored = Stored.of_model(folder)
    if not is_eagle3(stored) and not any(map(is_of_heads, stored)):
        files = ", ".join(HEADS_FILES)
        raise RequestError(f"no heads in {folder}: it holds neither {files} nor a model with heads inside")
    return stored


def _from_own_format(tensors: Tensors, published: Json, source: str) -> Checkpoint:
    """Make heads from the tensors and the config that `save` wrote."""
    if published["kind"] == "medusa" and not published.get("prefix_layers") and not published.get("vocabulary"):
        return from_published(HeadTensors(tensors), published, source)
    if "hidden_size" not in published:
        raise RequestError(f"{source}: its {CONFIG} has no hidden_size, so the heads cannot be loaded")
    return Checkpoint(MedusaConfig.from_dict(published), tensors).require_complete(source)
