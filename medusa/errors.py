"""The errors of this project, each with a message of one line: wrong requests, and runs that cannot continue."""


class RequestError(ValueError):
    """A wrong request, such as an invalid option. The message names the value, what is allowed and what to do instead.

    The command line prints the message and exits with status 2. In Python it is a `ValueError`."""


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


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an error's message; without a message, the name of the error's type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
