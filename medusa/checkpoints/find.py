"""Find heads: in a local folder, in the package, or on the Hub, of which only the needed files are downloaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypedDict, Unpack

from medusa.checkpoints.eagle3 import is_eagle3
from medusa.checkpoints.layout import CONFIG, DEMO, HEADS_FILES, PROVENANCE
from medusa.checkpoints.names import is_inside_a_model, is_of_heads
from medusa.checkpoints.stored import INDICES, Stored, read_index
from medusa.errors import RequestError, first_line

HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


class HubOptions(TypedDict, total=False):
    """Options of `huggingface_hub.snapshot_download`."""

    revision: str | None
    """A branch, tag or commit."""
    token: str | bool | None
    """For private and gated repositories; by default that of `hf auth login`."""
    cache_dir: str | Path | None
    """Where downloads are kept; by default the Hub's own cache."""
    local_files_only: bool
    """Use earlier downloads only."""


def find_folder(name_or_path: str | Path, **hub: Unpack[HubOptions]) -> Path:
    """The local folder of the heads; a Hub id is downloaded.

    Raises:
        RequestError: neither a folder nor on the Hub.
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
    """Download a file of heads; of a whole model only the files with heads in them."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(name, allow_patterns=[*patterns], **hub))

    folder = fetch(CONFIG, PROVENANCE, *HEADS_FILES, *INDICES)
    if any((folder / name).is_file() for name in HEADS_FILES):
        return folder
    for index in (folder / name for name in INDICES if (folder / name).is_file()):
        files = read_index(index)
        inside = {file for tensor, file in files.items() if is_inside_a_model(tensor)}
        return fetch(*sorted(inside or set(files.values())))
    fetch("*.safetensors")
    return folder if any(folder.glob("*.safetensors")) else fetch("*.bin")


def stored_heads(folder: Path) -> Stored:
    """The tensors of a file of heads or, if there is none, of a model with heads inside; neither is an error."""
    path = next((folder / name for name in HEADS_FILES if (folder / name).is_file()), None)
    if path is not None:
        return Stored.of_files(folder, [path])
    stored = Stored.of_model(folder)
    if not is_eagle3(stored) and not any(map(is_of_heads, stored)):
        raise RequestError(
            f"no heads in {folder}: it holds neither {', '.join(HEADS_FILES)} nor a model with heads inside"
        )
    return stored
