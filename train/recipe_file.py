"""The content of a training recipe: a YAML file, with overrides from the command line. It imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from medusa.errors import RequestError
from medusa.files import Json
from medusa.shipped import recipe_file

TEXTS = ("data", "eval_data")  # sections that a string can stand for: their path


class _Loader(yaml.SafeLoader):
    """Reads YAML in which no key occurs twice; PyYAML itself would keep the last value and say nothing."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before merges (<<) add keys, which may occur again
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(f"lines {lines[key.value]} and {line} both set {key.value}; leave one out")
                lines[key.value] = line
        return node


def _read(text: str) -> Any:
    """Read YAML; raise YAMLError, ValueError or RecursionError (nested too deeply) for anything else."""
    return yaml.load(text, _Loader)  # a safe loader, too


def read_recipe(path: str | Path, overrides: list[str]) -> Json:
    """Read the content of a recipe, without a check of its keys; see `train.recipe.load_recipe`."""
    path = recipe_file(path)
    try:
        content = _read(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} must hold a mapping with backbone, data, output_dir, heads and training")
    for override in overrides:
        _apply_override(content, override)
    return content


def _apply_override(content: Json, override: str) -> None:
    """Apply an override `section.key=value` to the content of a recipe. The value is read as YAML."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise RequestError(f"{override!r} is no override; write key=value, for example training.learning_rate=1e-3")
    *parents, last = name.split(".")
    place = content
    for parent in parents:
        if isinstance(place.get(parent), str) and parent in TEXTS:
            place[parent] = {"path": place[parent]}
        if place.get(parent) is None:  # missing, or a section of which all keys are comments
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise RequestError(f"cannot set {name}: {parent} is not a mapping")
    try:
        value = _read(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RequestError(f"{override!r}: {text!r} is not YAML; quote it") from None
    if name in TEXTS and isinstance(value, str) and isinstance(place.get(name), dict):
        place[name]["path"] = value  # and the other keys of the section stay
    else:
        place[last] = value
