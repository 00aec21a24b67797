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
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeVar, cast

from medusa.errors import RequestError
from medusa.options import REQUIRED, OptionError, Options

O = TypeVar("O", bound=Options)  # noqa: E741


@dataclass(frozen=True)
class Group:
    """Options that form one argument group."""

    kind: type[Options]
    title: str
    only: Collection[str]
    without: Collection[str]
    defaults: dict[str, object]

    @property
    def arguments(self) -> dict[str, Field[object]]:
        """The options that are arguments here, by name."""
        return {
            option.name: option
            for option in fields(self.kind)
            if "help" in option.metadata
            and option.name not in self.without
            and (not self.only or option.name in self.only)
        }


def group(
    kind: type[Options], title: str, *, only: Collection[str] = (), without: Collection[str] = (), **defaults: object
) -> Any:
    """A dataclass field that holds the options of `kind`.

    Args:
        only: the options that are arguments; by default all.
        without: options that are not arguments and keep their defaults.
        defaults: defaults that differ here; REQUIRED for an option that must be given here.
    """
    known = {name: value for name, value in defaults.items() if value is not REQUIRED}
    return field(default_factory=lambda: kind(**known), metadata={"group": Group(kind, title, only, without, defaults)})


def add_arguments(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add the arguments of the options of `kind`, in the order of its fields."""
    for known in fields(kind):
        about = known.metadata.get("group")
        if about is not None:
            titled = parser.add_argument_group(about.title)
            for name, option in about.arguments.items():
                _add(titled, option, about.defaults.get(name, option.default))
        elif "help" in known.metadata:
            _add(parser, known, known.default)


def _add(container: argparse._ActionsContainer, option: Field[object], default: object) -> None:
    """Add one argument: a flag for a bool, a repeatable argument for a tuple, else an argument with a value."""
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
    """The options of `kind` from a command line whose parser has no other arguments."""
    add_arguments(parser, kind)
    return read(kind, parser.parse_args(argv))


def read(kind: type[O], args: argparse.Namespace) -> O:
    """The options of `kind` from parsed arguments.

    Raises:
        RequestError: a value that is not allowed, or values that cannot be combined."""
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
    """The options, with errors that name the argument as it is typed."""
    try:
        return cast(O, kind(**values))
    except OptionError as error:
        raise RequestError(f"--{error}") from None


def _value(args: argparse.Namespace, option: Field[object]) -> object:
    value = getattr(args, option.metadata["name"] or option.name)
    return tuple(value) if isinstance(value, list) else value
