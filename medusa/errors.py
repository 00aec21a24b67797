"""The errors of this project, each with a message of one line: wrong requests, and runs that cannot continue."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from importlib.metadata import requires
from importlib.util import find_spec
from itertools import takewhile


class RequestError(ValueError):
    """A wrong request, such as an invalid option. The message names the value, what is allowed and what to do instead.

    The command line prints the message and exits with status 2. In Python it is a `ValueError`."""


class OptionError(RequestError):
    """A wrong option. The message begins with the option's name, which the command line writes as it is typed there."""

    def __init__(self, option: str, problem: str, *others: str) -> None:
        """Name the `option` as in Python, and where `problem` has a {}, each of the `others`."""
        flags = [f"--{name.replace('_', '-')}" for name in (option, *others)]
        super().__init__(f"{option} {problem.format(*others) if others else problem}")
        self.typed = f"{flags[0]} {problem.format(*flags[1:]) if others else problem}"


class NotCompilableError(OptionError):
    """Compiled steps are not possible: the model, the machine or another option rules them out."""

    def __init__(self, reason: str) -> None:
        super().__init__("compile", f"is not possible: {reason}; leave it out")
        self.reason = reason


class RunError(RuntimeError):
    """A failure during a run, such as a full disk or an unreachable server. The message says what to do.

    The command line prints the message and exits with status 1."""


class Interrupted(KeyboardInterrupt):
    """The end of a run by a signal: Ctrl-C (SIGINT) or SIGTERM. The command line exits with status 128 + `number`."""

    # A KeyboardInterrupt, so that no `except Exception` takes it for a failure of the work that it interrupts.
    def __init__(self, number: int, saved: str = "") -> None:
        """Name the signal's number, and in `saved` what was kept and how to continue."""
        super().__init__(saved)
        self.number, self.saved = number, saved


def require_extra(extra: str, *modules: str) -> None:
    """Raise a `RequestError` if a module of this distribution's optional dependencies `extra` is not installed.

    The advice names these dependencies, not this distribution, which no package index has."""
    if missing := [module for module in modules if find_spec(module) is None]:
        marker = f'extra == "{extra}"'
        known = [line.partition(";") for line in requires("medusa-heads") or ()]
        needed = [name.strip() for name, _, condition in known if condition.strip().replace("'", '"') == marker]
        raise RequestError(f"{' and '.join(missing)} is not installed; type: {shlex.join(['pip', 'install', *needed])}")


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message; without a message, the name of the error's type.

    A line that ends with a colon is a heading, so the next one follows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    headings = list(takewhile(lambda line: line.endswith(":"), lines))
    return " ".join(lines[: len(headings) + 1]) or type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the hint `; did you mean NAME?` for a mistyped word, with the nearest known name, or an empty string."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def require_arguments(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise RequestError if one of the keywords `given` to a Python `function` is not among the `known` ones."""
    names = list(known)
    if unknown := [name for name in given if name not in names]:
        hint = did_you_mean(unknown[0], names) or f"; choose from {', '.join(names)}"
        raise RequestError(f"{function} has no argument {unknown[0]}{hint}")


def choose_one_of(word: object, known: Iterable[str]) -> str:
    """Return the advice `choose one of A, B` for a word that is not among the known names, with the nearest name."""
    names = list(known)
    near = nearest(str(word), names)
    return f"choose one of {', '.join(names)}" + (f" (did you mean {near}?)" if near else "")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to `word`, ignoring case, or `None` if no name is similar."""
    names = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), names, n=1)
    return names[found[0]] if found else None
