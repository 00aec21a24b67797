"""Options as dataclass fields with a default, a check and a help text, for Python and the command line.

The options of a command are one dataclass. Its `option` fields are arguments; its `group` fields hold the options of
another dataclass, which form an argument group:

    class GenerateOptions(Options):
        settings: Settings = group(Settings, "generation", max_new_tokens=128)     # another default
        plain: bool = option(False, "decode without a drafter")
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar, dataclass_transform

from medusa.errors import RequestError

REQUIRED = MISSING  # the default of an option that the user must give
DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
ATTENTIONS = ("sdpa", "eager")
QUANTIZATIONS = ("4bit", "8bit")

Made = TypeVar("Made", bound="Options")


def option(
    default: object,
    help: str,
    allowed: str = "",
    check: Callable[[Any], bool] | None = None,
    metavar: str = "",
    name: str = "",
    **keywords: object,
) -> Any:
    """Declare an option: a dataclass field whose metadata describe its argument on the command line.

    The option must be given if `default` is `REQUIRED`.

    Args:
        help: the help text. The command line adds the default.
        allowed: a description of the valid values, for error messages.
        check: a function that returns whether a value is valid. `None` (the option is not given) is always valid.
        name: the name of the argument, if it differs from the field's name.
        keywords: more keywords for `add_argument`, `positional=True` (no `--`) or `hidden=True` (only for Python)."""
    about = {"help": help, "allowed": allowed, "check": check, "metavar": metavar, "name": name, "argparse": keywords}
    return field(default=default, metadata=about)


def count(default: object, help: str, metavar: str = "N", **keywords: Any) -> Any:
    """Declare an option whose value is a whole number of at least 1."""
    allowed = "a whole number of at least 1"
    return option(default, help, allowed, lambda value: value >= 1, metavar, type=int, **keywords)


def share(default: float, help: str, metavar: str, name: str = "") -> Any:
    """Declare an option whose value is a number from 0 to 1."""
    return option(default, help, "between 0 and 1", lambda value: 0 <= value <= 1, metavar, name)


def argument_name(known: Field[object]) -> str:
    """Return the name of an option's argument on the command line, without `--`."""
    return (known.metadata["name"] or known.name).replace("_", "-")


class OptionError(RequestError):
    """An invalid value of an option. The message begins with the option's name."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True)
class Options:
    """Base class of options: a subclass becomes a frozen dataclass, keyword-only unless it is declared `kw_only=False`.

    A new instance raises OptionError if a value is invalid."""

    def __init_subclass__(cls, kw_only: bool = True) -> None:
        dataclass(frozen=True, kw_only=kw_only)(cls)

    def __post_init__(self) -> None:
        for known in fields(self):
            check, value = known.metadata.get("check"), getattr(self, known.name)
            if check is not None and value is not None and not check(value):
                raise OptionError(f"{argument_name(known)} is {value}; it must be {known.metadata['allowed']}")

    def check_given(self, names: Sequence[str]) -> None:
        """Reject arguments that the user gave but that have no effect; this base class rejects none.

        Subclasses raise a `RequestError`. `names` are the arguments on the command line, without `--`. They include
        arguments that the user gave with their default values."""


class Group(NamedTuple):
    """Options of one dataclass that form an argument group of a command."""

    title: str
    make: Callable[..., Options]  # the dataclass, with the defaults of the command
    arguments: list[tuple[Field[object], object]]  # the options that are arguments of the command, with their defaults


def group(
    kind: type[Options], title: str, *, only: Collection[str] = (), without: Collection[str] = (), **defaults: object
) -> Any:
    """Make a field for the options of another dataclass, `kind`; these options form an argument group called `title`.

    Args:
        only: names of the options that become arguments; by default all.
        without: names of options that do not become arguments: the user cannot change their defaults.
        defaults: by option name, defaults that replace those in `kind`; REQUIRED if the user must give the option."""
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
    """Add an option's argument: a flag if `default` is False, repeatable if it is an empty tuple, else with one value.

    The parsed namespace contains only arguments that the user gives; for the others the dataclasses have defaults."""
    about, name = option.metadata, argument_name(option)
    keywords: dict[str, Any] = {"help": about["help"], "default": argparse.SUPPRESS} | about["argparse"]
    if keywords.pop("hidden", False):
        return
    positional = keywords.pop("positional", False)
    if default is False:
        keywords["action"] = "store_true"
    elif keywords.get("action") is not argparse.BooleanOptionalAction:  # it takes neither metavar nor type
        keywords["metavar"] = about["metavar"] or None
        if default is REQUIRED and not positional:
            keywords["required"] = True
        if default == () and "nargs" not in keywords:
            keywords["action"] = "append"
        if isinstance(default, int | float | str) and default != "":
            keywords["help"] += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
        if isinstance(default, int | float):
            keywords.setdefault("type", type(default))
        if about["allowed"] and keywords.get("type") in (int, float):
            keywords["type"] = partial(_number, keywords["type"], about["allowed"])
    container.add_argument(name if positional else f"--{name}", **keywords)


def _number(kind: Callable[[str], float], allowed: str, text: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no such number; it must be {allowed}") from None


def parse(kind: type[Made], parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> Made:
    """Parse a command line whose only arguments are the options in the dataclass `kind`, and return these options."""
    add_arguments(parser, kind)
    return read(kind, parser.parse_args(argv))


def read(kind: type[Made], args: argparse.Namespace) -> Made:
    """Make the options, an instance of the dataclass `kind`, from parsed arguments.

    Raise a RequestError if a value is invalid, or two options cannot be combined."""
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


def as_arguments(options: Options) -> list[str]:
    """Return the arguments of the command line with which `read` makes these options; defaults are left out."""
    positional, named = list[str](), list[str]()
    for known in fields(options):
        value = getattr(options, known.name)
        if "group" in known.metadata:
            arguments = known.metadata["group"].arguments
            chosen = [(option, getattr(value, option.name), default) for option, default in arguments]
        elif "help" in known.metadata:
            chosen = [(known, value, known.default)]
        else:
            continue
        for option, given, default in chosen:
            keywords = option.metadata["argparse"]
            if given == default or keywords.get("hidden"):
                continue
            name = f"--{argument_name(option)}"
            if keywords.get("positional"):
                positional += [str(part) for part in (given if isinstance(given, tuple) else (given,))]
            elif isinstance(given, bool):
                named.append(name if given else f"--no-{argument_name(option)}")
            elif isinstance(given, tuple):
                named += [name, *map(str, given)] if "nargs" in keywords else [w for v in given for w in (name, str(v))]
            else:
                named += [name, str(given)]
    return positional + named


class LoadOptions(Options, kw_only=False):
    """Options for loading a backbone; RequestError if a value is invalid or this machine does not have the device."""

    dtype: str | None = option(
        None, f"load weights as {' or '.join(DTYPE_NAMES)} (default: float32 on a CPU, the checkpoint's dtype on a GPU)"
    )
    device: str | None = option(
        None, "compute on cpu, cuda, cuda:1 or mps; auto spreads the layers over all devices (default: a GPU if any)"
    )
    attention: str | None = option(None, "compute attention by sdpa or eager (default: sdpa if the model has it)")
    revision: str | None = option(None, "load this branch, tag or commit of the backbone from the Hub")
    trust_remote_code: bool = option(False, "run the Python code that comes with the backbone")
    quantization: str | None = option(None, "load weights quantised by bitsandbytes: 4bit or 8bit")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype is not None and self.dtype not in DTYPE_NAMES:
            raise RequestError(f"--dtype is {self.dtype!r}; choose one of {', '.join(DTYPE_NAMES)}")
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise RequestError(f"--attention is {self.attention!r}; choose sdpa or eager, which take tree masks")
        if self.device is not None and self.device != "auto":
            _require_device(self.device)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise RequestError(f"quantization is {self.quantization!r}; choose 4bit or 8bit, or leave it out")
        if self.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
            raise RequestError(
                f"quantization: {self.quantization} needs bitsandbytes, which is not installed; install it, or leave "
                "quantization out"
            )

    @property
    def hub(self) -> dict[str, str | bool | None]:
        """The options for the Hub, as keyword arguments of transformers' `from_pretrained`."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def _require_device(device: str) -> None:
    """Raise RequestError if PyTorch has no such device on this machine."""
    import torch

    try:
        asked = torch.device(device)
    except RuntimeError:
        raise RequestError(f"--device is {device!r}; choose cpu, cuda, cuda:0, ..., mps or auto") from None
    count = torch.cuda.device_count()
    if asked.type == "cuda" and (asked.index or 0) >= count:
        raise RequestError(f"--device is {device!r}, and PyTorch sees {count} GPU(s); choose cpu or leave it out")
    if asked.type == "mps" and not torch.backends.mps.is_available():
        raise RequestError(f"--device is {device!r} and PyTorch sees no Apple GPU; choose cpu or leave it out")
