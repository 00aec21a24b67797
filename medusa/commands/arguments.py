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
from collections.abc import Callable, Collection, Sequence
from dataclasses import Field, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from medusa.errors import RequestError
from medusa.options import REQUIRED, OptionError, Options, argument_name

Made = TypeVar("Made", bound=Options)


class Group(NamedTuple):
    """Options of one dataclass that form an argument group of a command."""

    title: str
    make: Callable[..., Options]
    """The dataclass, with the defaults of the command."""
    arguments: list[tuple[Field[object], object]]
    """The options that are arguments of the command, each with its default."""


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
    chosen = [known for known in own_first if known.name not in without and (not only or known.name in only)]
    arguments = [(known, defaults.get(known.name, known.default)) for known in chosen if "help" in known.metadata]
    make = partial(kind, **{name: value for name, value in defaults.items() if value is not REQUIRED})
    return field(default_factory=make, metadata={"group": Group(title, make, arguments)})


def add_arguments(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add an argument to `parser` for each option in the dataclass `kind`, in the order of its fields."""
    for known in fields(kind):
        if "group" in known.metadata:
            title, _, arguments = known.metadata["group"]
            titled = parser.add_argument_group(title)
            for option, default in arguments:
                _add(titled, option, default)
        elif "help" in known.metadata:
            _add(parser, known, known.default)


def _add(container: argparse._ActionsContainer, option: Field[object], default: object) -> None:
    """Add the argument of one option: a flag if the option is a bool, repeatable for a tuple, else with one value.

    Only arguments that the user gives are in the parsed namespace. `read` leaves the others to the dataclasses."""
    about, name = option.metadata, argument_name(option)
    keywords: dict[str, Any] = {"help": about["help"], "default": argparse.SUPPRESS} | about["argparse"]
    if keywords.pop("hidden", False):
        return
    positional = keywords.pop("positional", False)
    if default is False:
        keywords["action"] = "store_true"
    else:
        keywords["metavar"] = about["metavar"] or None
        if default is REQUIRED and not positional:
            keywords["required"] = True
        if default == () and "nargs" not in keywords:
            keywords["action"] = "append"
        if isinstance(default, int | float | str) and default != "":
            keywords["help"] += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
        if isinstance(default, int | float):
            keywords.setdefault("type", type(default))
    container.add_argument(name if positional else f"--{name}", **keywords)


def parse(kind: type[Made], parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> Made:
    """Parse a command line whose only arguments are the options in the dataclass `kind`, and return these options."""
    add_arguments(parser, kind)
    return read(kind, parser.parse_args(argv))


def read(kind: type[Made], args: argparse.Namespace) -> Made:
    """Make the options, an instance of the dataclass `kind`, from parsed arguments.

    Raises:
        RequestError: a value is invalid, or two options cannot be combined."""
    groups, own = {}, []
    for known in fields(kind):
        if "group" in known.metadata:
            _, make, arguments = known.metadata["group"]
            groups[known.name] = _make(make, [option for option, _ in arguments], args)
        elif "help" in known.metadata:
            own.append(known)
    return _make(partial(kind, **groups), own, args)


def _make(make: Callable[..., Made], options: Sequence[Field[object]], args: argparse.Namespace) -> Made:
    """Make options from the arguments that the user gave; an error names the invalid argument as the user types it."""
    names = {option.name: argument_name(option) for option in options}
    values = {name: getattr(args, typed.replace("-", "_"), argparse.SUPPRESS) for name, typed in names.items()}
    given = {name: value for name, value in values.items() if value is not argparse.SUPPRESS}
    try:
        made = make(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
    except OptionError as error:
        raise RequestError(f"--{error}") from None
    made.check_given([names[name] for name in given])
    return made
