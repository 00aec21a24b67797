"""A training recipe read from a YAML file, with overrides from the command line."""

from __future__ import annotations

import math
from pathlib import Path

import yaml

from medusa.errors import RequestError
from medusa.files import Json
from medusa.shipped import recipe_file
from train.arguments import training_section
from train.config import TrainConfig, own_key_paths
from train.sections import key_paths, validated
from train.trainer_keys import UNUSED

OLD_NAMES = {"activation_checkpointing": "gradient_checkpointing"}  # new name: its name in transformers 5.17
NO_STEPS = (-1, "-1")  # values of max_steps that stand for no limit, as in transformers


def load_recipe(path: str | Path, overrides: list[str]) -> TrainConfig:
    """Read a recipe from a YAML file or by its shipped name, with overrides such as `training.learning_rate=1e-3`.

    Raise RequestError if there is no such recipe, or a key or value is wrong."""
    path = recipe_file(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise RequestError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} must hold a mapping with backbone, data, output_dir, heads and training")
    for override in overrides:
        _apply_override(content, override)
    return parse_recipe(content, str(path))


def parse_recipe(content: Json, source: str) -> TrainConfig:
    """Turn a recipe's content into a `TrainConfig`, or raise RequestError, with the name `source` in its message."""
    section = training_section()
    known = section.model_fields
    paths = [*key_paths(TrainConfig), *own_key_paths(), *(f"training.{name}" for name in known)]
    config = validated(TrainConfig, content, f"{source}: ", paths=paths)
    for name in filter(UNUSED.get, config.training):
        raise RequestError(f"{source}: training.{name} is not supported; {UNUSED[name]}")
    given = {name if name in known else OLD_NAMES.get(name, name): value for name, value in config.training.items()}
    if given.get("max_steps") in NO_STEPS:
        given.pop("max_steps")
    validated(section, given, f"{source}: ", "training.", paths)
    config.training = {name: section.as_meant(name, value) for name, value in given.items()}
    for name, value in config.training.items():
        if isinstance(value, float) and not math.isfinite(value) and (name, value) != ("max_grad_norm", math.inf):
            raise RequestError(f"{source}: training.{name} is {value}; it must be a finite number")
    return config


def _apply_override(content: Json, override: str) -> None:
    """Apply an override `section.key=value` to the content of a recipe. The value is read as YAML."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise RequestError(f"{override!r} is no override; write key=value, for example training.learning_rate=1e-3")
    *parents, last = name.split(".")
    place = content
    for parent in parents:
        if isinstance(place.get(parent), str) and parent in ("data", "eval_data"):
            place[parent] = {"path": place[parent]}
        if place.get(parent) is None:  # missing, or a section of which all keys are comments
            place[parent] = {}
        place = place[parent]
        if not isinstance(place, dict):
            raise RequestError(f"cannot set {name}: {parent} is not a mapping")
    try:
        place[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise RequestError(f"{override!r}: {text!r} is not YAML; quote it") from None
