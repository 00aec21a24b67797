"""The errors of this project, each with a message of one line: wrong requests, and runs that cannot continue."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RequestError(ValueError):
    """A wrong request, such as an invalid option. The message names the value, what is allowed and what to do instead.

    The command line prints the message and exits with status 2. In Python it is a `ValueError`."""


class RunError(RuntimeError):
    """A failure during a run, such as a full disk or an unreachable server. The message says what to do.

    The command line prints the message and exits with status 1."""


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message; without a message, the name of the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the question `; did you mean X?` with the name in `known` that is nearest to `word`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
