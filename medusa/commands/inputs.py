"""Checks that the inputs that options name exist. They import no torch, so a mistyped name is refused at once."""

from __future__ import annotations

from pathlib import Path

from medusa.errors import RequestError
from medusa.files import Json
from medusa.places import require_backbone, require_heads
from medusa.records.sources import require_records


def require_drafter(spec: str) -> None:
    """Raise RequestError if a drafter (as in --drafter) names a model or a datastore that does not exist."""
    parts = spec.partition("mix:")[2].split("+") if spec.startswith("mix:") else [spec]
    for part in parts:
        name, _, options = part.partition(":")
        first = options.partition(",")[0].removeprefix("model=").removeprefix("datastore=")
        if name == "model" and first and "=" not in first:
            require_backbone(first)
        if name == "rest" and first and "=" not in first and not Path(first).is_dir():
            raise RequestError(f"no datastore at {first}: give a folder that medusa datastore build made")


def require_against(spec: str) -> None:
    """Raise RequestError if a method (as in --against) names a draft model that does not exist."""
    require_drafter(spec if spec.startswith("model:") else "")


def require_recipe_inputs(content: Json) -> None:
    """Raise RequestError if the content of a recipe names a backbone, data or heads that do not exist."""
    if isinstance(name := content.get("backbone"), str):
        require_backbone(name)
    for key in ("data", "eval_data"):
        section = content.get(key)
        for source in (section.get("path"), section.get("exclude")) if isinstance(section, dict) else (section,):
            if isinstance(source, str) and source:
                require_records(source)
    if isinstance(heads := content.get("heads"), dict) and isinstance(heads.get("start"), str):
        require_heads(heads["start"])
