"""The base of a recipe's sections, which are pydantic models, and error messages of one line for them."""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import astuple, fields
from enum import Enum
from functools import reduce
from types import GenericAlias, NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, GetPydanticSchema, ValidationError, create_model, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, core_schema

from medusa.errors import RequestError, choose_one_of, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

PLAIN = {int, str, float, bool, NoneType}
WANTED = {"string_type": "a string (quote it)", "dict_type": "a mapping of keys", "model_type": "a mapping of keys"}
BOUNDS = {Ge: "at least", Gt: "above", Le: "at most", Lt: "below"}


def one_of(*names: str) -> GetPydanticSchema:
    """Annotation that restricts a string field to given names, like `Literal`, but with names computed at run time."""
    plain = core_schema.literal_schema(list(names))
    optional = core_schema.nullable_schema(plain)
    return GetPydanticSchema(lambda kind, _: optional if NoneType in get_args(kind) else plain)


class Section(BaseModel):
    """Base class of a recipe's sections. Unknown keys and values of a wrong type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _undo_yaml(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        return {key: cls.as_meant(key, value) for key, value in content.items()}

    @classmethod
    def as_meant(cls, key: str, value: object) -> object:
        """Convert the value of `key` if YAML 1.1 has read it as another type than the field has.

        YAML reads 1e-3 and 1e3 as strings (a number is written 1.0e-3), and `no` and `yes` as booleans."""
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else object
        kinds = () if isinstance(annotation, GenericAlias) else get_args(annotation) or (annotation,)
        if isinstance(value, str) and (int in kinds or float in kinds) and str not in kinds:
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, float) and value.is_integer() and int in kinds and float not in kinds:
            return int(value)
        if isinstance(value, bool) and str in kinds and bool not in kinds:
            return "yes" if value else "no"
        return value


def section_of(
    arguments: type[DataclassInstance], limits: Mapping[str, tuple[Any, ...]], without: Container[str]
) -> type[Section]:
    """Make a `Section` with a dataclass's fields, except those in `without`.

    It checks plain types, such as `int`, the values of enums, and the `limits` of fields. Floats may be infinite."""
    hints = get_type_hints(arguments, include_extras=True)
    kinds: dict[str, Any] = {
        field.name: (_yaml_type(hints[field.name], *limits.get(field.name, ())), None)
        for field in fields(arguments)
        if field.name not in without
    }
    return create_model(arguments.__name__, __base__=Section, __cls_kwargs__={"allow_inf_nan": True}, **kinds)


def _yaml_type(hint: object, *given: object) -> object:
    """A field's YAML type, with the limits that are `given` and those in the `hint`.

    The type is `object` (any value) if there are other types than those in `PLAIN` and enums."""
    whole, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    members = get_args(whole) if get_origin(whole) in (Union, UnionType) else (whole,)
    kinds = tuple(kind for kind in members if not (isinstance(kind, type) and issubclass(kind, Enum)))
    limits += given
    for choices in (kind for kind in members if isinstance(kind, type) and issubclass(kind, Enum)):
        limits.append(one_of(*(str(choice.value) for choice in choices)))
    plain = reduce(operator.or_, kinds) if kinds and PLAIN.issuperset(kinds) else object
    return Annotated[plain, *limits] if limits else plain


AnySection = TypeVar("AnySection", bound=Section)


def validated(
    section: type[AnySection], content: object, source: str = "", prefix: str = "", paths: Sequence[str] = ()
) -> AnySection:
    """Check the content of a section, as read from YAML, and return the section.

    Raise RequestError if a key is unknown or missing, or a value is not allowed. The message starts with `source`, and
    `prefix`, such as "training.", comes before keys. For an unknown key it suggests one of the section or of `paths`,
    the keys of the whole recipe."""
    try:
        return section.model_validate(content)
    except ValidationError as refusal:
        raise RequestError(source + _explain(refusal, section, prefix, paths)) from None


def key_paths(section: type[Section]) -> list[str]:
    """The paths of all keys of a section and of the sections in it, such as "heads.num"."""
    found = []
    for name, field in section.model_fields.items():
        inner = _inner(field)
        found += [name] if inner is None else [name, *(f"{name}.{path}" for path in key_paths(inner))]
    return found


def _inner(field: FieldInfo) -> type[Section] | None:
    """The class of the section that a field holds, or `None` if the field is a plain key."""
    kinds = get_args(field.annotation) or (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _unknown(parts: tuple[str, ...], section: type[Section], prefix: str, paths: Sequence[str]) -> str:
    path, word = prefix + ".".join(parts), parts[-1]
    names = {known.rpartition(".")[2]: known for known in paths}
    if same := [known for known in paths if known.rpartition(".")[2] == word]:
        return f"unknown key {path}; did you mean {' or '.join(same)}?"
    if near := nearest(word, section.model_fields):
        return f"unknown key {path}; did you mean {path.removesuffix(word)}{near}?"
    if near := nearest(word, names):
        return f"unknown key {path}; did you mean {names[near]}?"
    return f"unknown key {path}; known: {', '.join(section.model_fields)}"


def _explain(refusal: ValidationError, section: type[Section], prefix: str, paths: Sequence[str]) -> str:
    """Describe the first error of a section in one line: key with its path, value, and what is allowed."""
    errors = refusal.errors(include_url=False)
    # A misspelled required key is both unknown and missing; a suggestion for the unknown key helps more.
    error = min(errors, key=lambda one: one["type"] != "extra_forbidden")
    kind = error["type"]
    if kind == "value_error":  # raised by a section's own validator
        return str(error["ctx"]["error"])
    parts, section, field = _locate(section, error)
    path = prefix + ".".join(parts)
    if field is None:
        return _unknown(parts, section, prefix, paths)
    if kind in ("missing", "string_too_short") or (error["input"] is None and field.is_required()):
        return f"{path} is missing; add `{': {'.join(parts)}: ...{'}' * (len(parts) - 1)}`"
    value = repr(error["input"]) if isinstance(error["input"], str) else str(error["input"])
    if kind == "literal_error":
        names = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{path} is {value}; {choose_one_of(error['input'], names)}"
    bounds = [f"{BOUNDS[type(one)]} {astuple(one)[0]}" for one in field.metadata if type(one) in BOUNDS]
    if bounds and kind.startswith(("greater", "less")):  # all bounds, not only the one that the value breaks
        return f"{path} is {value}; it must be {' and '.join(bounds)}"
    # A union of types gives one error for each type, all for the same key.
    same = [one for one in errors if one["loc"][: len(parts)] == parts]
    wanted = [WANTED.get(one["type"], one["msg"].removeprefix("Input should be ")) for one in same]
    return f"{path} is {value}; it must be {' or '.join(dict.fromkeys(wanted))}"


def _locate(section: type[Section], error: ErrorDetails) -> tuple[tuple[str, ...], type[Section], FieldInfo | None]:
    """Find the key of an error: its path, its section's class and its field (`None` for an unknown key)."""
    parts: tuple[str, ...] = ()
    field = None
    for part in map(str, error["loc"]):
        if field is not None:
            inner = _inner(field)
            if inner is None:  # the rest of the path points into a value
                break
            section = inner
        parts, field = (*parts, part), section.model_fields.get(part)
        if field is None:
            break
    return parts, section, field
