"""Arguments of a command line, made from the options of a dataclass: their parser, their help and their values."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, fields
from functools import partial
from typing import Any, NoReturn, TypeVar

from medusa.commandline import width
from medusa.errors import RequestError, choose_one_of
from medusa.options import REQUIRED, Options, argument_name

Made = TypeVar("Made", bound=Options)
WORDS = "words"  # the arguments without `--` whose meaning depends on the other arguments
MAX_EXAMPLES = 4  # in `--help`


def add_arguments(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """Add an argument to `parser` for each option in the dataclass `kind`, in the order of its fields."""
    if kind.by_position:
        parser.add_argument(WORDS, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for known in fields(kind):
        if "group" in known.metadata:
            title, _, arguments = known.metadata["group"]
            titled = parser.add_argument_group(title)
            for option, default in arguments:
                _add(titled, option, default, kind)
        elif "help" in known.metadata:
            _add(parser, known, known.default, kind)


def add_help(parser: argparse.ArgumentParser, kind: type[Options], doc: str) -> None:
    """Add `--help`, which fits one screen, and `--help-all`, which lists all options in groups, to a command's parser.

    `doc` is the docstring of the command's module: its purpose, indented examples and, for `--help-all`, the rest."""
    parser.usage, parser.description = _usage(parser.prog, kind), _wrapped(doc)
    parser.add_argument("-h", "--help", action=_Help, text=partial(_brief_help, parser.prog, kind, doc))
    parser.add_argument("--help-all", action=_Help, text=parser.format_help, help="list all options")


class _Help(argparse.Action):
    """An argument that prints a text and ends the program."""

    def __init__(self, text: Callable[[], str], **keywords: Any) -> None:
        keywords |= {"nargs": 0, "default": argparse.SUPPRESS, "help": keywords.get("help") or "show the main options"}
        super().__init__(**keywords)
        self.text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(self.text(), end="")
        parser.exit()


def _usage(program: str, kind: type[Options]) -> str:
    """Return the line of usage: the program with its positional and required arguments."""
    words = []
    for known, default in _arguments(kind):
        about, name = known.metadata, argument_name(known)
        metavar = about["metavar"] or name.upper()
        if about["argparse"].get("positional"):
            words.append(f"[{metavar} ...]" if default == () else metavar)
        elif default is REQUIRED and name not in kind.by_position:
            words.append(f"--{name} {metavar}")
        elif default is REQUIRED and name in kind.by_position:
            words.append(name.upper())
        elif {name, f"{name}..."} & {*kind.by_position}:
            words.append(f"[{name.upper()} ...]" if default == () else f"[{name.upper()}]")
    return " ".join([program, *words, "[options]"])


def _wrapped(doc: str) -> str:
    """Wrap the paragraphs of a docstring to the terminal's width, except indented examples."""
    paragraphs = doc.strip("\n").split("\n\n")
    return "\n\n".join(part if part.startswith("  ") else textwrap.fill(part, width()) for part in paragraphs)


def _brief_help(program: str, kind: type[Options], doc: str) -> str:
    """Return the text of `--help`: usage, purpose, examples, and the options that `kind.shown` names."""
    purpose, *further = doc.strip().split("\n\n")
    examples = next((part for part in further if part.startswith("  ")), "").splitlines()[:MAX_EXAMPLES]
    about = "\n".join([_wrapped(purpose), "", *examples])
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        program, _usage(program, kind), about.rstrip(), formatter_class=formatter, add_help=False
    )
    shown = parser.add_argument_group("options")
    known = {argument_name(known): (known, default) for known, default in _arguments(kind)}
    for name in kind.shown.split() or known:
        _add(shown, *known[name], kind, brief=True)
    return parser.format_help() + f"\nAll options: {program} --help-all\n"


def _arguments(kind: type[Options]) -> Iterator[tuple[Field[object], object]]:
    """Yield all options of a command that are arguments, with their defaults."""
    for known in fields(kind):
        if "group" in known.metadata:
            yield from known.metadata["group"].arguments
        elif "help" in known.metadata:
            yield known, known.default


def _add(
    container: argparse._ActionsContainer,
    option: Field[object],
    default: object,
    kind: type[Options],
    brief: bool = False,
) -> None:
    """Add an option's argument: a flag if `default` is False, repeatable if it is an empty tuple, else with one value.

    The parsed namespace contains only arguments that the user gives; for the others the dataclasses have defaults. With
    `brief`, the help is the short one, and arguments that may be given by position are listed by their position."""
    about, name = option.metadata, argument_name(option)
    text = about["brief"] if brief and about["brief"] else about["help"]
    keywords: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS} | about["argparse"]
    if keywords.pop("hidden", False):
        return
    positional = keywords.pop("positional", False)
    if default is False:
        keywords["action"] = "store_true"
    elif keywords.get("action") is not argparse.BooleanOptionalAction:  # it takes neither metavar nor type
        keywords["metavar"] = about["metavar"] or None
        if default is REQUIRED and not positional and name not in kind.by_position:
            keywords["required"] = True
        if default == () and "nargs" not in keywords:
            keywords["action"] = "append"
        if isinstance(default, int | float | str) and default != "":
            keywords["help"] += f" (default: {default:g})" if isinstance(default, float) else f" (default: {default})"
        if isinstance(default, int | float):
            keywords.setdefault("type", type(default))
        if about["allowed"] and keywords.get("type") in (int, float):
            keywords["type"] = partial(_number, keywords["type"], about["allowed"])
        if choices := keywords.pop("choices", None):
            keywords |= {"type": partial(_choice, choices), "metavar": about["metavar"] or f"{{{','.join(choices)}}}"}
    if brief and name in kind.by_position:
        container.add_argument(name, metavar=name.upper(), help=keywords["help"])
    else:
        container.add_argument(name if positional else f"--{name}", **keywords)


def _number(kind: Callable[[str], float], allowed: str, text: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no such number; it must be {allowed}") from None


def _choice(known: Sequence[str], text: str) -> str:
    if text not in known:
        raise argparse.ArgumentTypeError(f"there is no {text!r}; {choose_one_of(text, known)}")
    return text


def parse(kind: type[Made], parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> Made:
    """Parse a command line whose only arguments are the options in the dataclass `kind`, and return these options."""
    add_arguments(parser, kind)
    return read(kind, parser.parse_args(argv))


def read(kind: type[Made], args: argparse.Namespace) -> Made:
    """Make the options, an instance of the dataclass `kind`, from parsed arguments.

    Raise a RequestError if a value is invalid, or two options cannot be combined."""
    _name_words(kind, args)
    _require_inputs(kind, args)
    groups, own = {}, []
    for known in fields(kind):
        if "group" in known.metadata:
            _, make, arguments = known.metadata["group"]
            groups[known.name] = _make(make, [option for option, _ in arguments], args)
        elif "help" in known.metadata:
            own.append(known)
    return _make(partial(kind, **groups), own, args)


def _name_words(kind: type[Options], args: argparse.Namespace) -> None:
    """Give the words without `--` to the arguments that they fill by position, in place.

    Raise a RequestError if there are more words than arguments, or if a required argument is missing."""
    words: list[str] = list(getattr(args, WORDS, ()))
    for name in kind.filled_by_position({name.replace("_", "-") for name in vars(args)}):
        if name.endswith("...") and words:
            dest = name.removesuffix("...").replace("-", "_")
            setattr(args, dest, [*words, *getattr(args, dest, ())])
            words = []
        elif words:
            setattr(args, name.replace("-", "_"), words.pop(0))
    if words:
        raise RequestError(f"unexpected argument {words[0]!r}; quote values with spaces, and name options with --")
    for known, default in _arguments(kind):
        name = argument_name(known)
        if default is REQUIRED and name in kind.by_position and not hasattr(args, name.replace("-", "_")):
            raise RequestError(f"{name.upper()} is missing; {known.metadata['help']}")


def _require_inputs(kind: type[Options], args: argparse.Namespace) -> None:
    """Raise a RequestError if an argument names an input, such as a file of prompts, that does not exist."""
    for known, _ in _arguments(kind):
        given = getattr(args, argument_name(known).replace("-", "_"), None)
        if given is not None and (exists := known.metadata.get("exists")) is not None:
            for value in (given,) if isinstance(given, str) else given:
                exists(value)


def _make(make: Callable[..., Made], options: Sequence[Field[object]], args: argparse.Namespace) -> Made:
    """Make options from the arguments that the user gave."""
    names = {option.name: argument_name(option) for option in options}
    values = {name: getattr(args, typed.replace("-", "_"), argparse.SUPPRESS) for name, typed in names.items()}
    given = {name: value for name, value in values.items() if value is not argparse.SUPPRESS}
    made = make(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
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
