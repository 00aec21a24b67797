"""Facts about heads that a model card tells: who published them, how they were trained, how fast they are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from medusa.checkpoints.folder import HUB_ID
from medusa.config import Fingerprint
from medusa.errors import RequestError
from medusa.files import Json, read_json
from medusa.records.sources import SUFFIXES

LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
# An absolute path, or one in a home folder, up to its last part; not the slashes of a URL or a Hub id.
FOLDERS = re.compile(r"(?<![\w:/.~-])~?/(?:[^\s/'\"=,]+/)*")


@dataclass
class Facts:
    """What is known about a set of heads and not stored in its tensors."""

    repo_id: str | None = None
    """The repository on the Hub, if it is known."""
    license: str | None = None
    """The Hub's name of it, such as apache-2.0."""
    provenance: Json | None = None
    """The content of `provenance.json`: recipe, data, training."""
    calibrations: list[Json] = field(default_factory=list)
    """The entries of `calibration.json`."""
    benchmark: Json | None = None
    """The content of a file of `medusa benchmark --json`."""

    def __post_init__(self) -> None:
        if self.license is not None and not LICENSE.fullmatch(self.license):
            raise RequestError(
                f"the license is {self.license!r}; give the Hub's name of it, such as apache-2.0, llama3.1 or other"
            )
        if self.repo_id is not None and not HUB_ID.fullmatch(self.repo_id):
            raise RequestError(f"the repository is {self.repo_id!r}; give its Hub id, such as org/heads")

    @property
    def data_name(self) -> str | None:
        """The name of the training data: a Hub id, or a path without its folders."""
        data = ((self.provenance or {}).get("config") or {}).get("data") or {}
        path = data.get("path")
        return path if is_hub_id(path) else without_folders(path)


def read_benchmark(path: str | Path) -> Json:
    """Read a file of `medusa benchmark --json` about heads.

    Raises:
        RequestError: another file, or figures of a drafter other than heads.
    """
    content = read_json(Path(path))
    parts = ("machine", "settings", "methods")
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in parts):
        raise RequestError(f"{path} is no benchmark; give a file that medusa benchmark --json wrote")
    if not {"transformers", "medusa"} <= content["methods"].keys() or content["settings"].get("heads") is None:
        raise RequestError(f"{path} measured no heads; give a benchmark of these heads")
    drafter = content["settings"].get("drafter", "heads")
    if drafter != "heads":
        raise RequestError(f"{path} measured drafter {drafter!r} first, not these heads; run it without --drafter")
    return content


def is_hub_id(name: str | None) -> bool:
    """Whether the name can be a Hub id: it looks like one and is no local file."""
    is_file = name is None or Path(name).exists() or Path(name).suffix in SUFFIXES
    return not is_file and HUB_ID.fullmatch(str(name)) is not None


@overload
def without_folders(content: Fingerprint) -> Fingerprint: ...
@overload
def without_folders(content: Any) -> Any: ...
def without_folders(content: Any) -> Any:
    """JSON without the folders of this machine: absolute paths become their last part, also inside commands."""
    if isinstance(content, dict):
        return {key: without_folders(value) for key, value in content.items()}
    if isinstance(content, list):
        return [without_folders(value) for value in content]
    if not isinstance(content, str):
        return content
    return Path(content).name if Path(content).is_absolute() else FOLDERS.sub("", content)
