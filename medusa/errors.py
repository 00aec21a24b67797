"""Errors with a message of one line: a wrong request, and a run that cannot go on."""


class RequestError(ValueError):
    """A request that cannot be carried out. The message names the value, what is allowed and the way out.

    The command line prints it as one line and exits with status 2; in Python it is a `ValueError`.
    """


class RunError(RuntimeError):
    """A run that cannot go on for outside reasons, such as a full disk or a server that is gone, with the way out.

    The command line prints it as one line and exits with status 1.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
