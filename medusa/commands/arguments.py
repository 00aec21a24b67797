"""Build the arguments of a command from its options, and read the options from the parsed arguments.

The options of a command are one dataclass. Its `option` fields are arguments; its `group` fields hold the options of
another dataclass, which form an argument group:

    @dataclass(frozen=True, kw_only=True)
    class GenerateOptions(Options):
        settings: Settings = group(Settings, "generation", max_new_tokens=128)     # another default
        plain: bool = option(False, "decode without a drafter")
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import Field, field, fields
from typing import Any, NamedTuple, TypeVar, cast

from medusa.errors import RequestError
from medusa.options import REQUIRED, OptionError, Options

O = TypeVar("O", bound=Options)  # noqa: E741


class Group(NamedTuple):
    """Options of one dataclass that form an argument group of a command."""

    kind: type[Options]
    title: str
    arguments: dict[str, Field[object]]
    """The fields of `kind` that are arguments of the command, by name."""
    defaults: dict[str, object]
    """Defaults that replace those of `kind`, by name."""


def group(
    kind: type[Options], title: str, *, only: Collection[str] = (), without: Collection[str] = (), **defaults: object
) -> Any:
    """Make a field for the options of another dataclass, `kind`; these options form an argument group called `title`.

    Args:
        only: names of the options that become arguments; by default all.
        without: names of options that do not become arguments and keep their defaults.
        defaults: by option name, defaults that replace those in `kind`; REQUIRED if the user must give the option.
    """
    own_first = sorted(fields(kind), key=lambda known: known.name not in kind.__annotations__)  # then inherited fields
    options = {known.name: known for known in own_first if "help" in known.metadata and known.name not in without}
    arguments = {name: known for name, known in options.items() if not only or name in only}
    given = {name: value for name, value in defaults.items() if value is not REQUIRED}
    return field(default_factory=lambda: kind(**given), metadata={"group": Group(kind, title, arguments, defaults)})


def add_arguments(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add an argument to `parser` for each option in the dataclass `kind`, in the order of its fields."""
    for known in fields(kind):
        about = known.metadata.get("group")
        if about is not None:
            titled = parser.add_argument_group(about.title)
            for name, option in about.arguments.items():
                _add(titled, option, about.defaults.get(name, option.default))
        elif "help" in known.metadata:
            _add(parser, known, known.default)


def _add(container: argparse._ActionsContainer, option: Field[object], default: object) -> None:
    """Add the argument of one option: a flag if the option is a bool, repeatable for a tuple, else with one value."""
    about, name = option.metadata, option.metadata["name"] or option.name
    keywords: dict[str, Any] = {"help": about["help"], "metavar": about["metavar"] or None} | about["argparse"]
    if keywords.pop("hidden", False):
        container.set_defaults(**{name: default})
        return
    positional = keywords.pop("positional", False)
    if default is False:
        keywords |= {"action": "store_true"}
        del keywords["metavar"]
    elif default == () and "nargs" not in keywords:
        keywords |= {"action": "append", "default": []}
    elif default is REQUIRED:
        keywords |= {} if positional else {"required": True}
    else:
        keywords |= {"default": default}
        if isinstance(default, int | float | str) and default != "":
            shown = f"{default:g}" if isinstance(default, float) else default
            keywords["help"] = f"{about['help']} (default: {shown})"
        if isinstance(default, int | float):
            keywords.setdefault("type", type(default))
    container.add_argument(name if positional else "--" + name.replace("_", "-"), **keywords)


def parse(kind: type[O], parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> O:
    """Parse a command line whose only arguments are the options in the dataclass `kind`, and return these options."""
    add_arguments(parser, kind)
    return read(kind, parser.parse_args(argv))


def read(kind: type[O], args: argparse.Namespace) -> O:
    """Make the options, an instance of the dataclass `kind`, from parsed arguments.

    Raises:
        RequestError: a value is invalid, or two options cannot be combined."""
    values: dict[str, object] = {}
    for known in fields(kind):
        about = known.metadata.get("group")
        if about is not None:
            given = {name: value for name, value in about.defaults.items() if value is not REQUIRED}
            given |= {name: _value(args, option) for name, option in about.arguments.items()}
            values[known.name] = _checked(about.kind, given)
        elif "help" in known.metadata:
            values[known.name] = _value(args, known)
    return _checked(kind, values)


def _checked(kind: type[O], values: dict[str, object]) -> O:
    """Make an instance of the options dataclass `kind`; an error names the invalid argument as the user types it."""
    try:
        return cast(O, kind(**values))
    except OptionError as error:
        raise RequestError(f"--{error}") from None


def _value(args: argparse.Namespace, option: Field[object]) -> object:
    value = getattr(args, option.metadata["name"] or option.name)
    return tuple(value) if isinstance(value, list) else value
