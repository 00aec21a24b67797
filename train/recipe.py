"""A training recipe from a YAML file and `key=value` overrides, checked; what is wrong in it becomes one line."""

from __future__ import annotations

import dataclasses
import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from medusa.errors import RequestError
from train.arguments import LIMITS, MedusaTrainingArguments
from train.config import Section, TrainConfig, as_meant

AnySection = TypeVar("AnySection", bound=Section)
OLD_NAMES = {"activation_checkpointing": "gradient_checkpointing"}  # in transformers 5.17
PLAIN = {"int": int, "str": str, "float": float, "bool": bool, "None": None}
KNOWN_SHOWN = 12  # keys that an error lists where none is similar
QUOTED = re.compile(r"'([^']*)'")
BOUNDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}
WANTED = {
    # The first word of pydantic's error type, and what the value must be.
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text (quote it)",
    "list": "a list",
    "dict": "a mapping of fields",
    "model": "a mapping of fields",
}


def load_recipe(path: str | Path, overrides: list[str]) -> TrainConfig:
    """Read a YAML file and apply `key.sub=value` overrides to it.

    Raises:
        RequestError: no such file, not YAML, an unknown key, a missing one, or a value that is not allowed.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(f"no such file: {path}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} is not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise RequestError(f"{path} must hold a mapping with backbone, data, output_dir, heads and training")
    for override in overrides:
        apply_override(content, override)
    return parse_recipe(content, str(path))


def parse_recipe(content: dict[str, Any], source: str) -> TrainConfig:
    """Check a recipe's content; `source` names it in errors. See `load_recipe`."""
    config = _validated(TrainConfig, content, source)
    section = training_section()
    fields = section.model_fields
    given = {name if name in fields else OLD_NAMES.get(name, name): value for name, value in config.training.items()}
    _validated(section, given, source, "training.")
    config.training = {name: as_meant(value, fields[name].annotation) for name, value in given.items()}
    return config


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set the key that `key.sub=value` names in a recipe's content, in place; the value is read as YAML."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise RequestError(f"{override!r} is no override; write key=value, for example training.learning_rate=1e-3")
    *parents, last = name.split(".")
    place = content
    for parent in parents:
        if isinstance(place.get(parent), str) and parent in ("data", "eval_data"):
            place[parent] = {"path": place[parent]}
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise RequestError(f"cannot set {name}: {parent} is not a mapping")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RequestError(f"{override!r}: {text!r} is not YAML; quote it") from None


@cache
def training_section() -> type[Section]:
    """The section `training` as a model: the fields of `MedusaTrainingArguments`, checked where their type is plain."""
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(MedusaTrainingArguments):
        text = field.type.__name__ if isinstance(field.type, type) else str(field.type)
        # An enumeration of transformers (with a dot in its name) is given as a string.
        kinds = [kind for kind in text.split(" | ") if not re.fullmatch(r"\w+(\.\w+)+", kind)]
        annotation: object = object
        if set(kinds) - {"None"} and set(kinds) <= set(PLAIN):
            annotation = PLAIN[kinds[0]]
            for kind in kinds[1:]:
                annotation = annotation | PLAIN[kind]  # type: ignore[operator]
        default = None if field.default is dataclasses.MISSING else field.default
        limits = {name: limit for name, limit in field.metadata.items() if name in LIMITS}
        fields[field.name] = (annotation, Field(default=default, description=field.metadata.get("help"), **limits))
    return create_model("TrainingSection", __base__=Section, **fields)


def _validated(section: type[AnySection], content: object, source: str, prefix: str = "") -> AnySection:
    try:
        return section.model_validate(content)
    except ValidationError as refusal:
        raise RequestError(f"{source}: {explain(refusal, section, prefix)}") from None


def explain(refusal: ValidationError, section: type[Section], prefix: str = "") -> str:
    """Say in one line what pydantic refused: the key with its path, its value, what is allowed and the way out.

    An unknown key comes first: where a required key is misspelled, a suggestion says more than "missing".
    """
    errors = refusal.errors(include_url=False)
    error = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    kind = error["type"]
    if kind == "value_error":  # from a validator of ours
        return str(error["ctx"]["error"])
    parts, section, field = _place(section, error)
    path = prefix + ".".join(parts)
    if field is None:
        near = difflib.get_close_matches(parts[-1], section.model_fields, n=1)
        known = f"known: {', '.join([*section.model_fields][:KNOWN_SHOWN])}"
        return f"unknown key {path}; {f'did you mean {path.removesuffix(parts[-1])}{near[0]}?' if near else known}"
    if kind in ("missing", "string_too_short") or (error["input"] is None and field.is_required()):
        return f"{path} is missing; add `{': {'.join(parts)}: ...{'}' * (len(parts) - 1)}`"
    value = repr(error["input"]) if isinstance(error["input"], str) else str(error["input"])
    if kind == "literal_error":
        return f"{path} is {value}; choose one of {', '.join(re.findall(QUOTED, error['ctx']['expected']))}"
    # A union of types gives an error for each of them, in the same place.
    kinds = [one["type"].partition("_")[0] for one in errors if one["loc"][: len(parts)] == parts]
    bounds = [f"{BOUNDS[type(one)]} {dataclasses.astuple(one)[0]}" for one in field.metadata if type(one) in BOUNDS]
    wanted = " or ".join(WANTED[kind] for kind in kinds if kind in WANTED) or " and ".join(bounds)
    return f"{path} is {value}; it must be {wanted}"


def _place(section: type[Section], error: ErrorDetails) -> tuple[tuple[str, ...], type[Section], FieldInfo | None]:
    """The path of the key that an error is about, the section that the key is in, and its field if there is one."""
    parts: tuple[str, ...] = ()
    field = None
    for part in map(str, error["loc"]):
        inner = section if field is None else _section_in(field)
        if inner is None:  # what follows is within a value
            break
        parts, section, field = (*parts, part), inner, inner.model_fields.get(part)
        if field is None:
            break
    return parts, section, field


def _section_in(field: FieldInfo) -> type[Section] | None:
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
