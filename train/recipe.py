"""A training recipe read from a YAML file, with overrides from the command line."""

from __future__ import annotations

import math
from pathlib import Path

from medusa.errors import RequestError
from medusa.files import Json
from medusa.shipped import recipe_file
from train.arguments import training_section
from train.config import TrainConfig, own_key_paths
from train.recipe_file import read_recipe
from train.sections import key_paths, validated
from train.trainer_keys import UNUSED

OLD_NAMES = {"activation_checkpointing": "gradient_checkpointing"}  # new name: its name in transformers 5.17
NO_STEPS = (-1, "-1")  # values of max_steps that stand for no limit, as in transformers


def load_recipe(path: str | Path, overrides: list[str]) -> TrainConfig:
    """Read a recipe from a YAML file or by its shipped name, with overrides such as `training.learning_rate=1e-3`.

    Raise RequestError if there is no such recipe, or a key or value is wrong."""
    return parse_recipe(read_recipe(path, overrides), str(recipe_file(path)))


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
