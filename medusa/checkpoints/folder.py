"""Loading of heads in any format from folders and the Hub, and saving in this project's format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple, TypedDict, Unpack

from medusa.checkpoints.checkpoint import Checkpoint
from medusa.checkpoints.published import FORM, PREFIX, HeadTensors, from_published, to_published
from medusa.checkpoints.stored import (
    CONFIG,
    HEADS_FILES,
    MASK_EMBEDDING,
    PROVENANCE,
    WEIGHTS,
    Form,
    Stored,
    save_tensors,
)
from medusa.config import MedusaConfig
from medusa.errors import RequestError, first_line
from medusa.files import ASSETS, Json, read_json, require_absent, write_json
from medusa.heads import HEADS, class_of
from medusa.places import SHIPPED, hub_keywords, require_heads, why_missing


class HubOptions(TypedDict, total=False):
    """The options of a download from the Hub. They go to `huggingface_hub.snapshot_download`."""

    revision: str | None
    token: str | bool | None
    cache_dir: str | Path | None
    local_files_only: bool


def load(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> Checkpoint:
    """Load heads like `MedusaHeads.from_pretrained`, but return config, tensors and provenance instead of a module.

    The names of the files, tensors and config keys show which format a folder has."""
    folder = find_folder(name_or_path, **hub)
    stored = _stored_heads(folder)
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict):
        raise RequestError(f"{folder / CONFIG} holds no JSON object")
    paths = stored.paths
    source = str(paths[0] if len(paths) == 1 else folder)
    if "kind" in published:
        checkpoint = _own_format(stored, published, source)
    else:
        checkpoint = (_form_of(stored) or FORM).read(stored, published, source, str(name_or_path))
    checkpoint.provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).is_file() else None
    return checkpoint


def _own_format(stored: Stored, published: Json, source: str) -> Checkpoint:
    """Make heads from files that this package has written."""
    if class_of(published["kind"]).form == "medusa" and not (
        published.get("prefix_layers") or published.get("vocabulary")
    ):
        return from_published(HeadTensors(dict(stored)), published, source)
    if "hidden_size" not in published:
        raise RequestError(f"{source}: its {CONFIG} has no hidden_size, so the heads cannot be loaded")
    return Checkpoint(MedusaConfig.from_dict(published), dict(stored)).require_complete(source)


def save(checkpoint: Checkpoint, folder: Path, overwrite: bool = True) -> None:
    """Write `config.json`, `medusa_lm_head.safetensors` and, if there is one, `provenance.json`, each file atomically.

    The tensors of plain Medusa heads (`MedusaConfig.is_published`) get FasterDecoding's names, which servers read.
    Other heads keep the names of their state dict. RequestError if `folder` has heads and `overwrite` is false."""
    require_absent(folder / WEIGHTS, overwrite)
    save_tensors(to_published(checkpoint), folder / WEIGHTS)
    write_json(folder / CONFIG, checkpoint.config.to_dict())
    if checkpoint.provenance is not None:
        write_json(folder / PROVENANCE, checkpoint.provenance)


def find_folder(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> Path:
    """Return a local folder of heads, or download heads with a Hub id. Raise RequestError if the name is neither."""
    name = str(name_or_path)
    if name == SHIPPED:
        return ASSETS / "heads"
    if name and Path(name).is_dir():
        return Path(name)
    require_heads(name)
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        offline = HubOptions(local_files_only=True) if hub_keywords(name) else HubOptions()
        return _download(name, {**offline, **hub})
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = why_missing(name, needs_owner=True)
        status = getattr(getattr(error, "response", None), "status_code", None)
        if not reason and status in (401, 403):  # 401 also stands for what does not exist
            what = "gated" if status == 403 else "not there, or private"
            reason = f"on the Hub it is {what} ({first_line(error)}); check the name, or log in with `hf auth login`"
        reason = reason or f"neither a local folder nor on the Hub ({first_line(error)})"
        raise RequestError(f"no heads at {name}: {reason}") from None


def _download(name: str, hub: HubOptions) -> Path:
    """Download those files of a Hub repository that can contain heads; return their local folder."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, allow_patterns=[*patterns], **hub))

    folder = fetch(CONFIG, PROVENANCE, *HEADS_FILES, MASK_EMBEDDING, "*.index.json")
    if any((folder / name).is_file() for name in HEADS_FILES):
        return folder
    if (indexed := Stored.of_index(folder)) is not None:
        inside = {path.name for tensor, path in indexed.places.items() if PREFIX.match(tensor)}
        return fetch(*sorted(inside or {path.name for path in indexed.paths}))
    fetch("*.safetensors")
    return folder if any(folder.glob("*.safetensors")) else fetch("*.bin")


class RecordedBackbone(NamedTuple):
    """The backbone that heads record, as far as they do."""

    name: str | None  # a folder or Hub id
    revision: str | None
    quantization: str | None  # how it was quantised while it was loaded


def recorded_backbone(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> RecordedBackbone:
    """Return the backbone that heads record; raise RequestError if there are no such heads."""
    folder = find_folder(name_or_path, **hub)
    published = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(published, dict) or "kind" not in published:  # another format: its converter finds the backbone
        published = load(name_or_path, **hub).config.to_dict()
    known = published.get("backbone") or {}
    name = published.get("base_model_name_or_path") or known.get("name")
    return RecordedBackbone(name, known.get("revision"), known.get("quantization"))


def _stored_heads(folder: Path) -> Stored:
    """Return the tensors of a folder's heads file, else those of its model, if it has one of the known forms."""
    for path in (folder / name for name in HEADS_FILES):
        if path.is_file():
            return Stored.of_files([path])
    stored = Stored.of_folder(folder)
    if _form_of(stored) is None:
        files = ", ".join(HEADS_FILES)
        raise RequestError(f"no heads in {folder}: it holds neither {files} nor a model with heads inside")
    return stored


def _form_of(stored: Stored) -> Form | None:
    """Find the form of other programs' files among those of all kinds of heads; `None` if they have none of them."""
    places = (place for kind in HEADS if (place := class_of(kind).published_form) is not None)
    forms: Iterator[Form] = map(resolve_name, places)
    return next((form for form in forms if form.recognises(stored)), None)
