"""Errors with a message of one line: wrong requests, and runs that cannot continue."""


class RequestError(ValueError):
    """A request that cannot be carried out. The message names the value, what is allowed and the way out.

    The command line prints it as one line and exits with status 2; in Python it is a `ValueError`.
    """


class RunError(RuntimeError):
    """A run that cannot continue, for example because a disk is full or a server is gone. The message has a way out.

    The command line prints it as one line and exits with status 1.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not empty, or the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
